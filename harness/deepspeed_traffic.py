"""What DeepSpeed's collectives of one update take in, call by call, for a given model and config.

:func:`harness.traffic.deepspeed_collectives` is the same as a formula; this follows the code: padding, buckets,
what stage 3 gathers when, and the small flags and norms. Gradients arrive in the reverse order of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.deepspeed_memory import padded_elements, sub_groups
from harness.memory import check_ranks, padded_params
from harness.parameters import Parameter, parameters_of
from harness.shape import ModelShape
from harness.traffic import Collective
from harness.zero3 import LookAhead, Recompute, gathers, persistent_parameters

UNSHARDED_BUCKET = 500_000_000  # elements of an all-reduce at stage 0 (runtime/engine.py)
NORMS = "norms and flags"


def counted_collectives(
    shape: ModelShape,
    settings: Mapping[str, Any],
    world_size: int,
    element_bytes: int,
    grad_accum_steps: int = 1,
    recompute: Recompute | None = None,
) -> list[Collective]:
    """Collectives of one update in steady state, bytes; all but :data:`NORMS` scale with the model.

    Args:
        settings: the ``zero_optimization`` section that DeepSpeed gets.
        element_bytes: of parameters and gradients.
    """
    check_ranks(world_size)
    stage = settings["stage"]
    if stage == 0:
        return unsharded(shape, element_bytes, world_size)
    if stage == 3:
        return sharded(shape, settings, world_size, element_bytes, grad_accum_steps, recompute or Recompute())
    reductions = grad_accum_steps if stage == 2 else 1
    collectives = partitioned(shape, settings, world_size, element_bytes, reductions)
    flag = [] if element_bytes == 4 else [Collective("all_reduce", 1, NORMS)]
    return [*collectives, *flag, Collective("all_reduce", 4, NORMS)]


def unsharded(shape: ModelShape, element_bytes: int, world_size: int) -> list[Collective]:
    """Stage 0: one all-reduce per bucket, which is sent once it is more than full."""
    calls, filled = 0, 0
    for parameter in parameters_of(shape):
        filled += parameter.elements
        if filled > UNSHARDED_BUCKET:
            calls, filled = calls + 1, 0
    return [Collective("all_reduce", shape.params * element_bytes, "gradients", calls + (filled > 0))]


def partitioned(
    shape: ModelShape, settings: Mapping[str, Any], world_size: int, element_bytes: int, reductions: int
) -> list[Collective]:
    """Stages 1 and 2: gradients bucket by bucket, then one all-gather of the flat, padded parameters."""
    buckets = fill_buckets(parameters_of(shape)[::-1], settings["reduce_bucket_size"])
    gradients = shape.params * element_bytes * reductions
    if settings["use_multi_rank_bucket_allreduce"]:
        reduced = Collective("all_reduce", gradients, "gradients", len(buckets) * reductions)
    else:
        calls = sum(owners(bucket, shape, world_size) for bucket in buckets)
        reduced = Collective("reduce", gradients, "gradients", calls * reductions)
    collectives = [reduced]
    if world_size > 1:
        padded = padded_params(shape.params, world_size)
        collectives.append(Collective("all_gather", padded * element_bytes, "parameters"))
    return collectives


def fill_buckets(parameters: tuple[Parameter, ...], size: int) -> list[list[Parameter]]:
    """Gradients in buckets of at most ``size`` elements; a larger one has its own."""
    buckets: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        if filled and filled + parameter.elements > size:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.elements
    return buckets


def owners(bucket: list[Parameter], shape: ModelShape, world_size: int) -> int:
    """How many ranks own a part of a bucket, in the flat group that is cut evenly."""
    partition = padded_params(shape.params, world_size) // world_size
    wanted, start = set(bucket), 0
    found: set[int] = set()
    for parameter in parameters_of(shape):
        if parameter in wanted:
            found.update(range(start // partition, (start + parameter.elements - 1) // partition + 1))
        start += parameter.elements
    return len(found)


def sharded(
    shape: ModelShape,
    settings: Mapping[str, Any],
    world_size: int,
    element_bytes: int,
    grad_accum_steps: int,
    recompute: Recompute,
) -> list[Collective]:
    """Stage 3: every parameter padded to a multiple of the ranks, gathered as :mod:`harness.zero3` replays."""
    parameters = parameters_of(shape)
    norms = (
        1 if "offload_optimizer" in settings else len(sub_groups(parameters, settings["sub_group_size"], world_size))
    )
    buckets = fill_buckets(parameters[::-1], settings["reduce_bucket_size"])
    reduced = grad_accum_steps * padded_elements(parameters, world_size) * element_bytes
    collectives = [
        Collective("reduce_scatter", reduced, "gradients", grad_accum_steps * len(buckets)),
        Collective("all_reduce", 4 * norms, NORMS, norms),
    ]
    if world_size == 1:
        return collectives
    ahead = look_ahead(settings)
    gathered = gathers(shape, recompute, ahead, grad_accum_steps > 1)
    elements = sum(padded_elements(each, world_size) for each in gathered)
    collectives.append(
        Collective(
            "all_gather", grad_accum_steps * elements * element_bytes, "parameters", grad_accum_steps * len(gathered)
        )
    )
    persistent = tuple(persistent_parameters(parameters, ahead.persistence_threshold))
    if persistent:
        payload = padded_elements(persistent, world_size) * element_bytes
        collectives.append(Collective("all_gather", payload, "parameters kept whole", len(persistent)))
    return collectives


def look_ahead(settings: Mapping[str, Any]) -> LookAhead:
    return LookAhead(
        prefetch_bucket=settings["stage3_prefetch_bucket_size"],
        persistence_threshold=settings["stage3_param_persistence_threshold"],
        max_live=settings["stage3_max_live_parameters"],
        max_reuse_distance=settings["stage3_max_reuse_distance"],
    )
