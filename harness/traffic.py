"""What each rank communicates per update: operations, bytes put in, and bytes sent if every operation is a ring.

The ZeRO paper (arXiv:1910.02054, section 7) and DeepSpeed's default differ: the paper's stages 1 and 2
reduce-scatter gradients and all-gather parameters, 2 Psi; DeepSpeed all-reduces gradients and then all-gathers
parameters, 3 Psi, unless ``use_multi_rank_bucket_allreduce`` is off, and from stage 2 on it reduces in every
micro step (deepspeed/runtime/zero/stage_1_and_2.py, issues #7059 and #5758).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.memory import check_ranks, check_stage

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


@dataclass(frozen=True)
class Collective:
    """One kind of collective in an update, all its ``calls`` taken together.

    ``payload`` is the size of the whole tensor (what a reduction takes in, what an all-gather puts out), in bytes or
    elements as asked for; it is what nccl-tests call the size.
    """

    operation: str
    payload: float
    purpose: str
    calls: int = 1

    def input(self, world_size: int) -> float:
        """What a rank puts in: its own part for an all-gather, the payload otherwise."""
        return self.payload / world_size if self.operation == "all_gather" else self.payload

    def sent(self, world_size: int) -> float:
        """What a rank sends in a ring."""
        return self.payload * ring_factor(self.operation, world_size)


def ring_factor(operation: str, world_size: int) -> float:
    """Payloads that each rank sends, on average, in a ring: 2(N-1)/N for an all-reduce, (N-1)/N for the others.

    Raises:
        ValueError: an unknown operation or fewer than one rank.
    """
    check_operation(operation)
    check_ranks(world_size)
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


def paper_collectives(stage: int, params: float, param_bytes: float = 1, grad_bytes: float = 1) -> list[Collective]:
    """Collectives of one update in the ZeRO paper, without accumulation; by default in elements.

    Stage 0 is plain data parallelism, 2 Psi; stages 1 and 2 also 2 Psi; stage 3 gathers twice, 3 Psi.
    """
    check_stage(stage)
    if stage == 0:
        return [Collective("all_reduce", params * grad_bytes, "gradients")]
    gathers = 2 if stage == 3 else 1
    return [
        Collective("reduce_scatter", params * grad_bytes, "gradients"),
        Collective("all_gather", gathers * params * param_bytes, "parameters"),
    ]


def deepspeed_collectives(
    stage: int,
    params: float,
    grad_accum_steps: int = 1,
    *,
    multi_rank_allreduce: bool = True,
    persistent_params: float = 0,
    param_bytes: float = 1,
    grad_bytes: float = 1,
    regather: bool = True,
) -> list[Collective]:
    """Collectives of one update as DeepSpeed issues them; by default in elements.

    Args:
        grad_accum_steps: micro steps per update. Stages 0 and 1 reduce once, stages 2 and 3 in every micro step.
        multi_rank_allreduce: stages 1 and 2, ``use_multi_rank_bucket_allreduce``: all-reduce gradients (the
            default); off: reduce each to the rank that owns it.
        persistent_params: stage 3, parameters below ``param_persistence_threshold``: whole on every rank,
            all-gathered once after the step.
        regather: stage 3, parameters are released after the forward pass and gathered again for the backward one;
            a model below ``max_live_parameters`` may keep them.

    Raises:
        ValueError: no such stage, accumulation below 1, or more persistent parameters than parameters.
    """
    check_stage(stage)
    check_accumulation(grad_accum_steps)
    if not 0 <= persistent_params <= params:
        raise ValueError(f"persistent_params={persistent_params}: must be between 0 and {params} parameters")
    if stage == 0:
        return [Collective("all_reduce", params * grad_bytes, "gradients")]
    if stage == 3:
        gathers = grad_accum_steps * (2 if regather else 1)
        gathered = gathers * (params - persistent_params) + persistent_params
        return [
            Collective("reduce_scatter", grad_accum_steps * params * grad_bytes, "gradients"),
            Collective("all_gather", gathered * param_bytes, "parameters"),
        ]
    reductions = grad_accum_steps if stage == 2 else 1
    return [
        Collective("all_reduce" if multi_rank_allreduce else "reduce", reductions * params * grad_bytes, "gradients"),
        Collective("all_gather", params * param_bytes, "parameters"),
    ]


def ddp_collectives(params: float, grad_bytes: float = 1) -> list[Collective]:
    """Collectives of one update of PyTorch DDP that accumulates under ``no_sync``; by default in elements."""
    return [Collective("all_reduce", params * grad_bytes, "gradients")]


def fsdp_collectives(
    params: float, grad_accum_steps: int = 1, param_bytes: float = 1, grad_bytes: float = 1, regather: bool = True
) -> list[Collective]:
    """Collectives of one update of PyTorch FSDP, fully sharded and reducing in every micro step.

    3 M (W-1)/W sent per micro step (Zhao et al. 2023, arXiv:2304.11277, section 3.2).
    """
    check_accumulation(grad_accum_steps)
    return [
        Collective("reduce_scatter", grad_accum_steps * params * grad_bytes, "gradients"),
        Collective("all_gather", grad_accum_steps * (2 if regather else 1) * params * param_bytes, "parameters"),
    ]


def sent_per_rank(collectives: list[Collective], world_size: int) -> float:
    """What each rank sends per update in rings, in the payloads' unit; 0 for one rank."""
    return sum(collective.sent(world_size) for collective in collectives)


def input_per_operation(collectives: list[Collective], world_size: int) -> dict[str, float]:
    """What each rank puts into each operation per update, as a communication logger counts it."""
    inputs: dict[str, float] = {}
    for collective in collectives:
        inputs[collective.operation] = inputs.get(collective.operation, 0.0) + collective.input(world_size)
    return inputs


def check_operation(operation: str) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation}: choose one of {', '.join(OPERATIONS)}")


def check_accumulation(grad_accum_steps: int) -> None:
    if grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps={grad_accum_steps}: must be at least 1")
