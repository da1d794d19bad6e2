"""Did two settings converge alike? MLPerf's test of a submission against reference convergence points (RCP).

MLPerf training rules, appendix "RCP": runs are epochs (or samples) to the target; the fastest and slowest of each set
are dropped, the standard deviation is the population's, and a submission is refused when it converges faster than
the reference could by chance (one-sided t-test, p = 0.05).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReferencePoint:
    """A reference and the fastest mean that ``submission_runs`` runs may have."""

    mean: float
    std: float
    min_mean: float
    max_speedup: float  # mean / min_mean - 1


def trimmed(runs: Sequence[float]) -> list[float]:
    """Runs without the fastest and the slowest.

    Raises:
        ValueError: fewer than three runs.
    """
    if len(runs) < 3:
        raise ValueError(f"{len(runs)} runs: dropping the fastest and the slowest needs at least 3")
    return sorted(runs)[1:-1]


def reference_point(runs: Sequence[float], submission_runs: int, p: float = 0.05) -> ReferencePoint:
    """The reference point of the reference's runs, for submissions of so many runs."""
    kept = trimmed(runs)
    return reference_point_of(statistics.fmean(kept), statistics.pstdev(kept), submission_runs, len(runs), p)


def reference_point_of(
    mean: float, std: float, submission_runs: int, reference_runs: int | None = None, p: float = 0.05
) -> ReferencePoint:
    """As :func:`reference_point`, from mean and standard deviation after dropping the extremes.

    The limit is mean - t(1 - p, dof) x std x sqrt(1/(R-2) + 1/(N-2)) with dof = (R-2) + (N-2) - 2.

    Args:
        reference_runs: R, by default twice the submission's N, as the rules demand.

    Raises:
        ValueError: too few runs, or a spread so wide that no mean would be too fast.
    """
    reference_runs = 2 * submission_runs if reference_runs is None else reference_runs
    if min(submission_runs, reference_runs) < 3:
        raise ValueError(f"{submission_runs} runs against {reference_runs}: both need at least 3")
    kept, submitted = reference_runs - 2, submission_runs - 2
    if kept + submitted < 3:
        raise ValueError(f"{submission_runs} runs against {reference_runs}: too few for a t-test")
    margin = t_quantile(1 - p, kept + submitted - 2) * std * math.sqrt(1 / kept + 1 / submitted)
    if margin >= mean:
        raise ValueError(f"a mean of {mean} with a spread of {std} allows any speed-up; add runs")
    return ReferencePoint(mean, std, mean - margin, mean / (mean - margin) - 1)


def t_probability(t: float, dof: int) -> float:
    """P(T <= t) of Student's distribution with whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Raises:
        ValueError: fewer than one degree of freedom.
    """
    if dof < 1:
        raise ValueError(f"{dof} degrees of freedom: must be at least 1")
    angle = math.atan(abs(t) / math.sqrt(dof))
    square = math.cos(angle) ** 2
    term = 1.0 if dof % 2 == 0 else math.cos(angle)
    total = 0.0
    for k in range(2 if dof % 2 == 0 else 3, dof + 1, 2):
        total += term
        term *= square * (k - 1) / k
    inside = math.sin(angle) * total
    if dof % 2:
        inside = 2 / math.pi * (angle + inside)
    return 0.5 + math.copysign(inside / 2, t)


def t_quantile(probability: float, dof: int) -> float:
    """The t below which Student's distribution has this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability}: must be between 0 and 1")
    if probability < 0.5:
        return -t_quantile(1 - probability, dof)
    low, high = 0.0, 1.0
    while t_probability(high, dof) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_probability(middle, dof) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
