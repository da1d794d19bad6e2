"""What PyTorch's DDP and FSDP2 hold and communicate: the baselines that ZeRO's stages are measured against.

DDP keeps fp32 weights, gradients and moments whole (16-bit runs are autocast). FSDP2 shards all of them in fp32 along
the first dimension, one group per transformer block and one for the rest, and gathers each group in the run's
precision (torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

import math

from harness.deepspeed_memory import MASTER_BYTES, MOMENTS, STEP_COUNT_BYTES
from harness.deepspeed_traffic import NORMS
from harness.memory import Moments, StateBytes
from harness.parameters import Module, Parameter, module_tree, parameters_of
from harness.shape import ModelShape
from harness.traffic import Collective

BUCKET_MB = 25.0  # of DDP, whose first bucket is smaller
FIRST_BUCKET_BYTES = 2**20


def optimizer_bytes_per_element(optimizer: str, momentum: bool) -> int:
    return MASTER_BYTES * (MOMENTS[optimizer] if optimizer == "adamw" or momentum else 0)


def held_by_ddp(
    shape: ModelShape, element_bytes: int, optimizer: str = "adamw", momentum: bool = True, grad_accum_steps: int = 1
) -> StateBytes:
    """Everything whole and in fp32; gradients are views of the buckets that are all-reduced, which stay. Without
    accumulation the second update lays the buckets out anew while the old are still there. Autocast keeps 16-bit copies
    of the weights through forward and backward."""
    steps = STEP_COUNT_BYTES * len(parameters_of(shape)) if optimizer == "adamw" else 0
    whole = MASTER_BYTES * shape.params
    copies = element_bytes * shape.params if element_bytes < MASTER_BYTES else 0
    computing = copies + whole * (2 if grad_accum_steps == 1 else 1)
    return StateBytes(
        param=whole,
        grad=whole,
        optimizer=optimizer_bytes_per_element(optimizer, momentum) * shape.params + steps,
        buffer=computing - whole,
        moments=Moments(loss=computing, first_gradient=computing, last_gradient=computing, update=whole),
    )


def counted_ddp(shape: ModelShape, bucket_mb: float | None = None) -> list[Collective]:
    """One all-reduce per bucket and update; accumulation happens under ``no_sync``."""
    size = (bucket_mb or BUCKET_MB) * 2**20
    calls, filled, limit = 0, 0, size if bucket_mb else FIRST_BUCKET_BYTES
    for parameter in reversed(parameters_of(shape)):
        filled += MASTER_BYTES * parameter.elements
        if filled >= limit:
            calls, filled, limit = calls + 1, 0, size
    return [Collective("all_reduce", MASTER_BYTES * shape.params, "gradients", calls + (filled > 0))]


def shard(parameter: Parameter, world_size: int) -> int:
    """Elements of the largest shard: whole rows, as many on each rank."""
    return math.ceil(parameter.rows / world_size) * (parameter.elements // parameter.rows)


def held_by_fsdp(
    shape: ModelShape,
    world_size: int,
    element_bytes: int,
    optimizer: str = "adamw",
    momentum: bool = True,
    grad_accum_steps: int = 1,
) -> StateBytes:
    """fp32 shards of parameters, gradients and moments; beside them two gathered groups in the run's precision."""
    parameters = parameters_of(shape)
    elements = sum(shard(parameter, world_size) for parameter in parameters)
    steps = STEP_COUNT_BYTES * len(parameters) if optimizer == "adamw" else 0
    groups = sorted((sum(p.elements for p in group) for group in fsdp_groups(shape)), reverse=True)
    gathered = element_bytes * sum(groups[:2]) if world_size > 1 else 0
    idle = MASTER_BYTES * shape.params if grad_accum_steps > 1 else 0  # whole until the last micro batch
    return StateBytes(
        param=MASTER_BYTES * elements,
        grad=MASTER_BYTES * elements,
        optimizer=optimizer_bytes_per_element(optimizer, momentum) * elements + steps,
        buffer=gathered,
        moments=Moments(
            loss=gathered + idle,
            first_gradient=gathered + idle,
            last_gradient=gathered + max(idle, MASTER_BYTES * elements),
            update=MASTER_BYTES * elements,
        ),
    )


def fsdp_groups(shape: ModelShape) -> list[list[Parameter]]:
    """The parameters that are gathered together: of each block, and first all others, which the root holds."""
    tree = module_tree(shape)
    blocks = [module for module in tree.walk() if module.is_block]
    inside = [own_parameters(block) for block in blocks]
    taken = {parameter for group in inside for parameter in group}
    return [[parameter for parameter in parameters_of(shape) if parameter not in taken], *inside]


def own_parameters(module: Module) -> list[Parameter]:
    return list(dict.fromkeys(parameter for each in module.walk() for parameter in each.parameters))


def counted_fsdp(
    shape: ModelShape, world_size: int, element_bytes: int, grad_accum_steps: int = 1, reshard: bool = True
) -> list[Collective]:
    """Gathers in every micro step, gradients in fp32 once per update; one rank has nothing to exchange.

    Args:
        element_bytes: of gathered parameters.
        reshard: blocks are released after the forward pass and gathered again for the backward one; the root's group
            is gathered once.
    """
    norm = Collective("all_reduce", 4, NORMS)
    if world_size == 1:
        return [norm]
    groups = [world_size * sum(shard(parameter, world_size) for parameter in group) for group in fsdp_groups(shape)]
    times = 2 if reshard else 1
    gathered = groups[0] + times * sum(groups[1:])
    return [
        Collective("reduce_scatter", sum(groups) * MASTER_BYTES, "gradients", len(groups)),
        Collective(
            "all_gather",
            grad_accum_steps * gathered * element_bytes,
            "parameters",
            grad_accum_steps * (1 + times * (len(groups) - 1)),
        ),
        norm,
    ]
