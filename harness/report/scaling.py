"""Arithmetic of scaling: speed-up, efficiency, and the spread over seeds. Pure functions of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of ``count`` equal measurements, in their unit."""

    median: float
    low: float
    high: float
    count: int

    def times(self, factor: float) -> Spread:
        """The spread of the values times a positive factor."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and range of what was measured; None stands for no measurement. None if nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def speed_up(rate: float, baseline_rate: float) -> float:
    """How many times faster than the baseline; both rates in the same unit, all ranks together."""
    check_positive(rate=rate, baseline_rate=baseline_rate)
    return rate / baseline_rate


def weak_efficiency(rate_per_rank: float, baseline_rate_per_rank: float) -> float:
    """Share of the baseline's rate per rank that is kept when work grows with the ranks.

    (tokens/s/rank) at N over (tokens/s/rank) at N0.
    """
    check_positive(rate_per_rank=rate_per_rank, baseline_rate_per_rank=baseline_rate_per_rank)
    return rate_per_rank / baseline_rate_per_rank


def strong_efficiency(ranks: int, time: float, baseline_ranks: int, baseline_time: float) -> float:
    """Share of the ideal speed-up reached for the same work: N0 T0 / (N T)."""
    check_positive(ranks=ranks, time=time, baseline_ranks=baseline_ranks, baseline_time=baseline_time)
    return baseline_ranks * baseline_time / (ranks * time)


def batch_efficiency(batch_size: float, critical_batch_size: float) -> float:
    """Share of the samples that a large batch does not waste: 1 / (1 + B / B_crit).

    Both sizes in sequences. McCandlish et al. 2018, arXiv:1812.06162, section 2.3: E = E_min (1 + B / B_crit).
    """
    check_positive(batch_size=batch_size, critical_batch_size=critical_batch_size)
    return 1 / (1 + batch_size / critical_batch_size)


def check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
