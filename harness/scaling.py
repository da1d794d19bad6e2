"""Adding ranks: step time from computation and communication, overlap, efficiency, days to train."""

from __future__ import annotations

import math

from harness.memory import check_ranks

SECONDS_PER_DAY = 86_400


def ddp_backward_time(buckets: int, compute: float, communication: float) -> float:
    """Backward time of DDP whose buckets are sent while the next is computed: b + (K-1) max(b, c) + c.

    Args:
        compute, communication: of one bucket, in the unit of the result.

    Raises:
        ValueError: no bucket.
    """
    if buckets < 1:
        raise ValueError(f"buckets={buckets}: must be at least 1")
    return compute + (buckets - 1) * max(compute, communication) + communication


def exposed_time(compute: float, communication: float, overlap: float = 1.0) -> float:
    """Communication that computation does not hide.

    Args:
        overlap: share of the computation that can run beside communication: 1 all of it, 0 none.

    Raises:
        ValueError: overlap outside 0 to 1.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap={overlap}: must be between 0 and 1")
    return max(0.0, communication - overlap * compute)


def step_time(compute: float, communication: float, overlap: float = 1.0) -> float:
    """Computation and exposed communication; with full overlap the larger of the two."""
    return compute + exposed_time(compute, communication, overlap)


def overlap_tokens(world_size: int, flops_per_second: float, bandwidth: float, grad_bytes: float = 2) -> float:
    """Tokens per rank and step above which the backward pass hides a ring all-reduce of the gradients.

    2 (N-1)/N x grad_bytes x Psi / bandwidth = 4 Psi x tokens / rate. In 16 bit (N-1)/N x rate / bandwidth, and the
    same for ZeRO-3: forward with one gather, backward with a gather and a reduce-scatter.

    Args:
        flops_per_second: that a rank really reaches.
        bandwidth: bus bandwidth, bytes/s.
    """
    check_ranks(world_size)
    return (world_size - 1) / world_size * grad_bytes / 2 * flops_per_second / bandwidth


def hop_latency(collectives: float, hop_seconds: float, world_size: int) -> float:
    """Latency per step of so many ring collectives, which grows with the ranks: n x alpha x (N-1)."""
    check_ranks(world_size)
    return collectives * hop_seconds * (world_size - 1)


def efficiency_with_exposed(reference_time: float, exposed: float) -> float:
    """Weak-scaling efficiency of a step that takes ``exposed`` longer than the reference."""
    return reference_time / (reference_time + exposed)


def weak_efficiency(tokens_per_s_per_rank: float, reference: float) -> float:
    """Throughput per rank over that of the reference world; 1 is perfect."""
    return tokens_per_s_per_rank / reference


def strong_efficiency(world_size: int, time: float, reference_world_size: int, reference_time: float) -> float:
    """N0 T0 / (N T): of the same work on more ranks; 1 is perfect."""
    check_ranks(min(world_size, reference_world_size))
    return reference_world_size * reference_time / (world_size * time)


def overhead(time: float, reference_time: float) -> float:
    """How much longer a time is than the reference, as a share of it: 0.33 is 33 %."""
    return time / reference_time - 1


def throughput_increase(time_before: float, time_after: float) -> float:
    """How much more work per time, as a share: 0.29 is 29 %."""
    return time_before / time_after - 1


def days_to_train(flops_per_token: float, tokens: float, ranks: int, flops_per_second: float) -> float:
    """Days of training (Narayanan et al. 2021, arXiv:2104.04473, section 5.1).

    Args:
        flops_per_token: hardware FLOPs if ``flops_per_second`` counts recompute, model FLOPs if it does not.
        flops_per_second: that each rank reaches.
    """
    check_ranks(ranks)
    if not (math.isfinite(flops_per_second) and flops_per_second > 0):
        raise ValueError(f"flops_per_second={flops_per_second}: must be above 0")
    return flops_per_token * tokens / (ranks * flops_per_second) / SECONDS_PER_DAY
