"""Step time of small worlds continued to larger ones, and how far that is from what the larger ones measured.

Strong scaling: t(N) = serial + parallel / N, the work that is not divided and the work that is (Amdahl 1967). Weak
scaling: t(N) = work + per_rank (N - 1): computation stays and rings get longer, as published steps of 128 to 512 GPUs
do. Two numbers each, fitted to the small worlds alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.report.curves import Curve, LeftOut, Panel
from harness.report.scaling import Spread
from harness.report.series import Series
from harness.report.throughput import KINDS, line_of, why_no_scaling

CHECKED = 1  # worlds, the largest ones, that are kept from the fit
FARTHEST = 4  # how many times the largest measured world a line goes on


@dataclass(frozen=True)
class StepTimeFit:
    """Seconds of an update against ranks: ``constant`` + ``slope`` x, with x = 1/N in strong, N - 1 in weak scaling."""

    kind: str
    constant: float
    slope: float

    def at(self, ranks: float) -> float:
        return self.constant + self.slope * abscissa(self.kind, ranks)


def abscissa(kind: str, ranks: float) -> float:
    return 1 / ranks if kind == "strong" else ranks - 1


def fit_step_times(kind: str, times: dict[int, float]) -> StepTimeFit:
    """Least squares of relative errors; neither part is negative.

    Args:
        kind: ``strong`` or ``weak``.
        times: seconds by ranks, of two worlds or more.

    Raises:
        ValueError: fewer than two worlds, or a time that is not positive.
    """
    if len(times) < 2 or min(times.values()) <= 0:
        raise ValueError(f"step times of {len(times)} worlds: a fit needs two or more, all above 0")
    rows = [(1 / time, abscissa(kind, ranks) / time) for ranks, time in times.items()]  # constant a + slope b = 1
    aa, ab, bb = (
        sum(x * y for x, y in pairs) for pairs in ([(a, a) for a, _ in rows], rows, [(b, b) for _, b in rows])
    )
    ya, yb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    constant, slope = (ya * bb - yb * ab) / determinant, (yb * aa - ya * ab) / determinant
    if constant < 0:
        constant, slope = 0.0, yb / bb
    elif slope < 0:
        constant, slope = ya / aa, 0.0
    return StepTimeFit(kind, constant, slope)


def step_times(series: list[Series]) -> Curve | LeftOut:
    """Measured step times, and the line of a fit to all but the largest world of each series."""
    slug, title = "extrapolation", "Step time extrapolated from the small worlds"
    measured = [(each, times_of(each)) for each in series if each.kind in KINDS]
    if not any(len(times) > CHECKED + 1 for _, times in measured):
        enough = any(len(times) > 1 for _, times in measured)
        why = "it needs three world sizes: two to fit, one to check" if enough else why_no_scaling(series)
        return LeftOut(slug, title, why)
    panels, misses = [], []
    colors: dict[str, int] = {}
    for kind, kind_title in KINDS.items():
        lines = []
        for each, times in measured:
            if each.kind != kind or len(times) <= CHECKED + 1:
                continue
            points, fitted = line_of(each, colors), line_of(each, colors, " fitted")
            worlds = sorted(times)
            fit = fit_step_times(kind, {ranks: times[ranks].median for ranks in worlds[:-CHECKED]})
            for ranks in worlds:
                points.add(ranks, times[ranks])
            fitted.dash = 1
            for ranks in [*worlds, *(worlds[-1] * 2**power for power in range(1, FARTHEST.bit_length()))]:
                value = fit.at(ranks)
                fitted.add(ranks, Spread(value, value, value, 1))
            lines += [points, fitted]
            for ranks in worlds[-CHECKED:]:
                misses.append(f"{each.label} at {ranks} ranks {times[ranks].median / fit.at(ranks) - 1:+.0%}")
        if lines:
            panels.append(Panel(kind_title, "ranks (world size)", "step time (s)", lines, "seconds", steps=True))
    note = (
        f"Fitted to all but the largest world of each series, which checks it: measured / fitted - 1 is "
        f"{'; '.join(misses[:8])}{' …' if len(misses) > 8 else ''}. Beyond it the lines are extrapolation."
    )
    return Curve(slug, title, panels, note)


def times_of(series: Series) -> dict[int, Spread]:
    """Median step times by ranks, over the completed runs."""
    found = {ranks: point.spread("step_time_s_median") for ranks, point in series.by_ranks().items()}
    return {ranks: time for ranks, time in found.items() if time is not None and time.low > 0}
