"""How long a collective takes: rings of latency and bandwidth, bus bandwidth, fits, and tables of measured times.

Sizes are bytes of the whole tensor (:class:`harness.traffic.Collective`'s payload), bandwidths bytes/s, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.memory import check_ranks
from harness.traffic import check_operation, ring_factor


def busbw_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (size / time), nccl-tests, doc/PERFORMANCE.md.

    2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather, 1 for broadcast and reduce.
    """
    check_operation(operation)
    check_ranks(world_size)
    return 1.0 if operation in ("broadcast", "reduce") else ring_factor(operation, world_size)


def busbw(operation: str, size: float, seconds: float, world_size: int) -> float:
    """Bus bandwidth of a measured call."""
    return size * busbw_factor(operation, world_size) / seconds


def time_at_busbw(operation: str, size: float, bandwidth: float, world_size: int) -> float:
    """Seconds of a call that reaches this bus bandwidth."""
    check_bandwidth(bandwidth)
    return size * busbw_factor(operation, world_size) / bandwidth


def ring_time(operation: str, size: float, world_size: int, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a ring: 2(N-1)(alpha + S/(N B)) for an all-reduce, (N-1)(alpha + S/(N B)) for the others.

    Args:
        bandwidth: of one link, bytes/s.
        latency: alpha, seconds of one hop.
    """
    check_bandwidth(bandwidth)
    hops = ring_hops(operation, world_size)
    return hops * (latency + size / (world_size * bandwidth))


def ring_hops(operation: str, world_size: int) -> int:
    """Steps of a ring, one after another."""
    check_operation(operation)
    check_ranks(world_size)
    return (2 if operation == "all_reduce" else 1) * (world_size - 1)


@dataclass(frozen=True)
class AlphaBeta:
    """Time of a call as latency + busbw factor x size / bandwidth, with the worst relative error of its fit."""

    operation: str
    world_size: int
    latency: float  # seconds of an empty call
    bandwidth: float  # bus bandwidth of an endless one
    max_relative_error: float = 0.0

    def time(self, size: float) -> float:
        return self.latency + time_at_busbw(self.operation, size, self.bandwidth, self.world_size)

    def at(self, world_size: int) -> AlphaBeta:
        """The same links in a ring of another size: the latency grows with its hops, the bandwidth stays."""
        hops = ring_hops(self.operation, self.world_size)
        if hops == 0:
            raise ValueError(f"{self.operation}: a fit on one rank says nothing about {world_size}")
        latency = self.latency * ring_hops(self.operation, world_size) / hops
        return AlphaBeta(self.operation, world_size, latency, self.bandwidth, self.max_relative_error)


def fit_alpha_beta(operation: str, world_size: int, sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Latency and bus bandwidth of least squared log(predicted / measured), so that small calls count like large ones.

    ``max_relative_error`` is the worst of |predicted / measured - 1| at the fitted sizes.

    Raises:
        ValueError: fewer than two different sizes, a size or time that is not positive, one rank, or times that do
            not grow with the size.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:
        raise ValueError(f"{operation}: a fit needs two or more positive sizes with a positive time each")
    factor = busbw_factor(operation, world_size)
    if factor == 0:
        raise ValueError(f"{operation}: one rank communicates nothing to fit")
    pairs = sorted(zip(sizes, seconds, strict=True))
    if pairs[-1][1] <= pairs[0][1]:
        raise ValueError(f"{operation}: the times do not grow with the size, so no bandwidth can be fitted")
    latency, per_byte = pairs[0][1], pairs[-1][1] / pairs[-1][0]
    damping, error = 1e-3, squared_log_error(latency, per_byte, pairs)
    for _ in range(200):  # Levenberg-Marquardt in log latency and log seconds per byte
        aa = bb = ab = ar = br = 0.0
        for size, time in pairs:
            share = latency / (latency + per_byte * size)
            residual = math.log((latency + per_byte * size) / time)
            aa, bb, ab = aa + share * share, bb + (1 - share) ** 2, ab + share * (1 - share)
            ar, br = ar + share * residual, br + (1 - share) * residual
        determinant = (aa + damping) * (bb + damping) - ab * ab
        step_a = (ar * (bb + damping) - br * ab) / determinant
        step_b = (br * (aa + damping) - ar * ab) / determinant
        tried = latency * math.exp(-step_a), per_byte * math.exp(-step_b)
        tried_error = squared_log_error(*tried, pairs)
        if tried_error <= error:
            (latency, per_byte), error, damping = tried, tried_error, damping / 3
            if max(abs(step_a), abs(step_b)) < 1e-9:
                break
        else:
            damping *= 4
    worst = max(abs((latency + per_byte * size) / time - 1) for size, time in pairs)
    return AlphaBeta(operation, world_size, latency, factor / per_byte, worst)


def squared_log_error(latency: float, per_byte: float, pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(math.log((latency + per_byte * size) / time) ** 2 for size, time in pairs)


@dataclass(frozen=True)
class CollectiveTable:
    """Measured times of one operation on one world, by ascending size."""

    operation: str
    world_size: int
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2 or not ascending or self.sizes[0] <= 0:
            raise ValueError(f"{self.operation}: a table needs two or more ascending sizes with a time each")
        if min(self.seconds) <= 0:
            raise ValueError(f"{self.operation}: a time of {min(self.seconds)} s was not measured")

    def covers(self, size: float) -> bool:
        """Whether the size lies in the measured range; outside, a time is an extrapolation and must be called one."""
        return self.sizes[0] <= size <= self.sizes[-1]

    def time(self, size: float) -> float:
        """Seconds of a call: between measured sizes along a line of log time over log size.

        Below the smallest size the smallest's time (latency), above the largest at the largest's bandwidth.
        """
        if size <= 0:
            return 0.0
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        above = next(i for i, known in enumerate(self.sizes) if known >= size)
        low, high = self.sizes[above - 1], self.sizes[above]
        share = math.log(size / low) / math.log(high / low)
        return self.seconds[above - 1] * (self.seconds[above] / self.seconds[above - 1]) ** share

    def fit(self) -> AlphaBeta:
        return fit_alpha_beta(self.operation, self.world_size, self.sizes, self.seconds)


def check_bandwidth(bandwidth: float) -> None:
    if not bandwidth > 0:
        raise ValueError(f"bandwidth={bandwidth}: must be above 0 bytes/s")
