"""Bytes of model states that a rank of DeepSpeed really holds just before an optimizer step, padding included.

``param`` is what the forward pass reads, ``grad`` gradients and their flat partitions, ``optimizer`` moments and fp32
master weights; ``buffer`` what communication and offloading keep besides. With offloading some of it lies in the
host's memory. Follows deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and runtime/fp16/unfused_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.memory import Moments, StateBytes, check_ranks, ipg_bucket_bytes, padded_params
from harness.parameters import Parameter, parameters_of
from harness.shape import ModelShape
from harness.zero3 import persistent_parameters

MASTER_BYTES = 4  # fp32: master weights, their gradients and the moments
STEP_COUNT_BYTES = 4  # AdamW's own step count, one per tensor
MOMENTS = {"adamw": 2, "sgd": 1}


def held_by_deepspeed(
    shape: ModelShape,
    settings: Mapping[str, Any],
    world_size: int,
    element_bytes: int,
    grad_accum_steps: int = 1,
    optimizer: str = "adamw",
    momentum: bool = True,
) -> StateBytes:
    """Model states of the fullest rank.

    Args:
        settings: the ``zero_optimization`` section that DeepSpeed gets.
        element_bytes: of parameters and gradients: 2 in bf16 and fp16, 4 in fp32.
        momentum: SGD keeps one.
    """
    check_ranks(world_size)
    moments = MOMENTS[optimizer] if optimizer == "adamw" or momentum else 0
    step_counts = STEP_COUNT_BYTES if optimizer == "adamw" else 0
    stage, parameters = settings["stage"], parameters_of(shape)
    if stage == 0:
        whole = shape.params
        master = 0 if element_bytes == MASTER_BYTES else MASTER_BYTES  # in 16 bit an fp32 copy and its gradients
        return StateBytes(
            param=element_bytes * whole,
            grad=(element_bytes + master) * whole,
            optimizer=(MASTER_BYTES * moments + master) * whole + step_counts * len(parameters),
            moments=Moments(
                loss=element_bytes * whole * (grad_accum_steps > 1),
                last_gradient=element_bytes * whole,
                update=(element_bytes + master) * whole,
            ),
        )
    offload = "offload_optimizer" in settings
    per_master = MASTER_BYTES * (1 + moments)
    if stage < 3:
        partition = padded_params(shape.params, world_size) // world_size
        accumulates = grad_accum_steps > 1
        grad, reduced = MASTER_BYTES * partition, element_bytes * partition
        produced = element_bytes * shape.params if stage == 1 else reduced  # what a backward pass leaves
        if offload:
            if accumulates:
                grad += element_bytes * accumulated(parameters, partition)
            buffer = reduced + 2 * element_bytes * max(p.elements for p in parameters)
            idle, update = 0, 0
        else:
            buffer = ipg_bucket_bytes(
                settings["reduce_bucket_size"],
                element_bytes,
                settings["overlap_comm"],
                settings["contiguous_gradients"],
            )
            idle = produced + (buffer if stage == 1 else 0) if accumulates else 0  # stage 1 keeps its buckets too
            update = step_gradients(partition, element_bytes)
        first = max(idle, buffer)
        early = stage == 2 or settings["overlap_comm"]  # else buckets are filled and reduced after the backward pass
        return StateBytes(
            param=element_bytes * (padded_params(shape.params, world_size)),
            grad=grad,
            optimizer=per_master * partition + step_counts,
            buffer=buffer,
            moments=Moments(
                loss=idle,
                first_gradient=first,
                first_bucket=first + (reduced if early else 0),
                until_bucket=until_first_bucket(shape, settings),
                last_gradient=buffer + produced,
                update=update if early else max(update, buffer + produced + reduced),
            ),
            on_host=per_master * partition if offload else 0,
        )
    groups = sub_groups(parameters, settings["sub_group_size"], world_size)
    partition = sum(groups)
    in_step = partition if offload else groups[0]  # fp32 gradients: of all groups on the host, or of one at a time
    threshold = settings["stage3_param_persistence_threshold"]
    persistent = sum(p.elements for p in persistent_parameters(parameters, threshold)) if world_size > 1 else 0
    bucket = settings["reduce_bucket_size"] if settings["contiguous_gradients"] else 0
    live = min(shape.params, settings["stage3_max_live_parameters"]) if world_size > 1 else 0
    kept = element_bytes * (persistent + bucket + (0 if offload else partition))
    update = 0 if offload else element_bytes * (partition - in_step) + step_gradients(in_step, element_bytes)
    return StateBytes(
        param=element_bytes * partition,
        grad=element_bytes * partition + MASTER_BYTES * in_step,
        optimizer=per_master * partition + step_counts * len(groups),
        buffer=element_bytes * (persistent + bucket + live),
        moments=Moments(
            loss=kept + element_bytes * live,
            first_gradient=kept + element_bytes * live,
            last_gradient=kept + element_bytes * live,
            update=element_bytes * (persistent + bucket) + update,
        ),
        on_host=per_master * partition if offload else 0,
    )


def until_first_bucket(shape: ModelShape, settings: Mapping[str, Any]) -> float:
    """Share of the backward pass in which the first bucket of gradients fills; the vocabulary's come before any
    block's."""
    head = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return min(1.0, max(0, settings["reduce_bucket_size"] - head) / shape.params)


def step_gradients(elements: int, element_bytes: int) -> int:
    """Bytes of gradients while they are made fp32 for the optimizer: as reduced, flattened, and converted."""
    return elements * (2 * element_bytes + (MASTER_BYTES if element_bytes < MASTER_BYTES else 0))


def accumulated(parameters: tuple[Parameter, ...], partition: int) -> int:
    """Elements that the fullest rank accumulates with offloading: each parameter of which it owns a part, whole."""
    totals: dict[int, int] = {}
    start = 0
    for parameter in parameters:
        end = start + parameter.elements
        for rank in range(start // partition, (end - 1) // partition + 1):
            totals[rank] = totals.get(rank, 0) + parameter.elements
        start = end
    return max(totals.values())


def sub_groups(parameters: tuple[Parameter, ...], size: int, world_size: int) -> list[int]:
    """Elements on one rank of each group of parameters that stage 3 updates together."""
    shares = [padded_elements((parameter,), world_size) // world_size for parameter in parameters]
    groups = [0]
    for share in shares:
        if groups[-1] >= size:
            groups.append(0)
        groups[-1] += share
    return groups


def padded_elements(parameters: tuple[Parameter, ...], world_size: int) -> int:
    """Elements with each parameter padded to a multiple of the ranks (partition_parameters.py, _aligned_size)."""
    return sum(-(-parameter.elements // world_size) * world_size for parameter in parameters)
