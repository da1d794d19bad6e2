"""The data of the picture of predicted against measured: memory, bytes given to collectives, step time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.curves import Curve, LeftOut, Line, Panel
from harness.report.record import is_number
from harness.report.scaling import Spread
from harness.report.series import Comparison, Point

STATES = ("param_bytes", "grad_bytes", "optimizer_bytes")
Numbers = Callable[[dict[str, Any]], float | None]  # of a summary, or of what was predicted for it


def states(numbers: dict[str, Any]) -> float | None:
    """Bytes of parameters, gradients and optimizer state together."""
    parts = [numbers.get(key) for key in STATES]
    known = [float(part) for part in parts if part is not None and is_number(part)]
    return sum(known) if len(known) == len(STATES) else None


def given(numbers: dict[str, Any]) -> float | None:
    """Bytes given to all collectives in one update; None if there were none."""
    sent = numbers.get("comm_bytes_per_step")
    known = [count for count in sent.values() if is_number(count)] if isinstance(sent, dict) else []
    return sum(known) or None


def number_of(key: str) -> Numbers:
    def read(numbers: dict[str, Any]) -> float | None:
        value = numbers.get(key)
        return float(value) if value is not None and is_number(value) and value > 0 else None

    return read


PANELS: tuple[tuple[str, str, Numbers], ...] = (
    ("model states of a rank", "bytes", states),
    ("peak memory of a rank", "bytes", number_of("peak_memory_bytes")),
    ("given to collectives per update", "bytes", given),
    ("step time", "seconds", number_of("step_time_s_median")),
)


def against_measured(comparison: Comparison) -> Curve | LeftOut:
    """A point per completed point of the study: what was predicted across, what was measured up."""
    slug, title = "predicted", "Predicted against measured"
    points = [(str(each.values.get("sharding") or "all runs"), Point(each.runs)) for each in comparison.by_run()]
    if not any(run.summary.get("predicted") for _, point in points for run in point.completed):
        return LeftOut(slug, title, "no completed run carries a prediction")
    panels, worst = [], []
    for name, quantity, read in PANELS:
        lines = lines_of(points, read)
        if not lines:
            continue
        errors = [y / x - 1 for line in lines for x, y in zip(line.x, line.y, strict=True)]
        worst.append(f"{name} {min(errors):+.1%} to {max(errors):+.1%}")
        reach = [value for line in lines for value in (*line.x, *line.y)]
        lines.append(Line("equal", [min(reach), max(reach)], [min(reach), max(reach)], ideal=True))
        unit = "s" if quantity == "seconds" else "bytes"
        panels.append(Panel(name, f"predicted ({unit})", f"measured ({unit})", lines, quantity, points=True))
    if not panels:
        return LeftOut(slug, title, "nothing that was predicted was also measured")
    return Curve(slug, title, panels, f"Measured / predicted - 1: {'; '.join(worst)}.")


def lines_of(points: list[tuple[str, Point]], read: Numbers) -> list[Line]:
    """The points of each label in ascending order of the prediction, medians over seeds."""
    pairs: dict[str, list[tuple[float, Spread]]] = {label: [] for label, _ in points}
    for label, point in points:
        measured = point.spread(lambda run: read(run.summary))
        expected = point.median(lambda run: read(run.summary.get("predicted") or {}))
        if measured is not None and measured.low > 0 and expected:
            pairs[label].append((expected, measured))
    lines = []
    for number, (label, found) in enumerate(pairs.items()):
        line = Line(label, color=number)
        for expected, measured in sorted(found, key=lambda pair: pair[0]):
            line.add(expected, measured)
        if line.x:
            lines.append(line)
    return lines
