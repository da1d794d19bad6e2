"""The data of the pictures of cost: step time, memory per rank, bytes given to collectives."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable
from typing import Any

from harness.report.curves import (
    RANKS_LABEL,
    BarPanel,
    Bars,
    Curve,
    LeftOut,
    Line,
    Panel,
    marks_of,
)
from harness.report.record import Run
from harness.report.scaling import Spread
from harness.report.series import RANKS, Comparison, Point, Series, label_of, natural
from harness.report.throughput import by_kind, several_worlds

MEMORY = {
    "param_bytes": "parameters",
    "grad_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "pending_gradient_bytes": "gradients held back (async)",
    "peak_memory_bytes": "peak, all together",
}
UNSHARDED = ("ZeRO-0", "DDP")


def step_times(comparison: Comparison, series: list[Series]) -> Curve | Bars | LeftOut:
    """Median step time with the 90th percentile as whisker, both medians over seeds."""
    slug, title = "step_time", "Step time (whisker: 90th percentile)"
    if several_worlds(series):

        def fill(each: Series, line: Line) -> None:
            for ranks, point in each.by_ranks().items():
                value = step_time(point)
                if value:
                    line.add(ranks, value)

        return Curve(slug, title, by_kind(series, "step time (s)", fill, "seconds"))
    points = [(each.label, Point(each.runs)) for each in comparison.by_run()]
    values = [step_time(point) for _, point in points]
    if not any(values):
        return LeftOut(slug, title, "no completed run has step times")
    medians, ends = ([getattr(value, part) if value else 0.0 for value in values] for part in ("median", "high"))
    panel = BarPanel("", "step time (s)", {"median": medians}, "seconds", reach=ends)
    return Bars(slug, title, [label for label, _ in points], [panel], missing=missing_rows(points))


def missing_rows(points: list[tuple[str, Point]]) -> dict[int, str]:
    """How the points ended in which nothing completed, by row."""
    return {row: ", ".join(point.statuses) for row, (_, point) in enumerate(points) if not point.completed}


def step_time(point: Point) -> Spread | None:
    """Seconds: the median step as low and median, the 90th percentile as high."""
    median, p90 = point.spread("step_time_s_median"), point.spread("step_time_s_p90")
    if median is None:
        return None
    high = max(p90.median, median.median) if p90 else median.median
    return Spread(median.median, median.median, high, median.count)


def memory(comparison: Comparison, series: list[Series]) -> Curve | Bars | LeftOut:
    """Bytes that a rank holds, by what for, with what a perfect 1/N share would be."""
    slug, title = "memory_per_rank", "Memory per rank"
    known = [key for key in MEMORY if any(run.number(key) is not None for run in comparison.runs)]
    if not known:
        return LeftOut(slug, title, "no run has measured its memory")
    if not several_worlds(series):
        return memory_bars(slug, title, comparison, known)
    points = [(each.values, memory_of(each)) for each in comparison.by_run()]
    told_apart = deciding_keys([point for point in points if None not in point[1]], comparison.varied, close)
    series = comparison.series(lambda run: (RANKS, *(key for key in comparison.varied if key not in told_apart)))
    panels = []
    for key in known:
        lines = []
        colors: dict[str, int] = {}
        for each in series:
            line = Line(each.label, marks=marks_of(each.by_ranks()), values=each.values, dash=each.kind == "weak")
            rest = label_of({name: value for name, value in each.values.items() if name != "batch.kind"})
            line.color = colors.setdefault(rest, len(colors))
            for ranks, point in each.by_ranks().items():
                value = point.spread(key)
                if value:
                    line.add(ranks, value)
            if line.x or line.marks:
                lines.append(line)
        if any(line.x for line in lines):
            lines += ideal_shares(series, key)
            panels.append(Panel(MEMORY[key], RANKS_LABEL, "bytes per rank", lines, "bytes", steps=True))
    note = (
        "Grey, dashed: a 1/N share of the most that one rank holds in a run that shards nothing. Without a GPU the peak is the "
        "whole process, libraries included."
    )
    if len(told_apart) < len(comparison.varied):
        note += " Runs whose memory differs by less than 5 % are one line."
    return Curve(slug, title, panels, note) if panels else LeftOut(slug, title, "no completed run measured its memory")


def memory_bars(slug: str, title: str, comparison: Comparison, known: list[str]) -> Bars | LeftOut:
    """The same for a single world size: a bar per point."""
    points = [(each.label, Point(each.runs)) for each in comparison.by_run()]
    if not any(point.median(key) is not None for _, point in points for key in known):
        return LeftOut(slug, title, "no completed run measured its memory")
    panels = []
    for key in known:
        values = [point.median(key) or 0.0 for _, point in points]
        shares = [line.y[-1] for line in ideal_shares(comparison.by_ranks(), key)]
        panels.append(
            BarPanel(
                MEMORY[key], "bytes per rank", {MEMORY[key]: values}, ideal=shares[0] if len(shares) == 1 else None
            )
        )
    note = "Grey, dashed: an ideal 1/N share." if any(panel.ideal for panel in panels) else ""
    return Bars(slug, title, [label for label, _ in points], panels, note, missing_rows(points))


def ideal_shares(series: list[Series], key: str) -> list[Line]:
    """Per group of series that differ in nothing but sharding: what one rank holds unsharded, divided by N.

    Unsharded is what a rank of ZeRO-0 or DDP holds, or else one rank alone. A group without either has no line.
    """
    groups: dict[Any, list[Series]] = {}
    for each in series:
        rest = tuple((name, value) for name, value in each.values.items() if name != "sharding")
        groups.setdefault((rest, each.kind), []).append(each)
    lines = []
    for group in groups.values():
        worlds = sorted({ranks for each in group for ranks in each.by_ranks()})
        measured = [
            (sharding_of(each) in UNSHARDED, ranks, value)
            for each in group
            for ranks, point in each.by_ranks().items()
            if (value := point.median(key))
        ]
        whole = [value for unsharded, _, value in measured if unsharded]
        whole = whole or [value for _, ranks, value in measured if ranks == 1]
        if whole and max(worlds) > 1:
            shares = [max(whole) / ranks for ranks in worlds]
            values = {key: value for key, value in group[0].values.items() if key != "sharding"}
            lines.append(Line("ideal 1/N", [float(ranks) for ranks in worlds], shares, ideal=True, values=values))
    return lines


def sharding_of(series: Series) -> str:
    config = series.runs[0].config
    return f"ZeRO-{config['zero.stage']}" if config["engine.kind"] == "deepspeed" else config["engine.kind"].upper()


def communication(comparison: Comparison) -> Bars | LeftOut:
    """Bytes given to collectives per update and rank, by operation; points that send the same share a row."""
    slug, title = "communication", "Bytes given to collectives per update and rank"
    points: list[tuple[dict[str, Any], dict[str, float]]] = []
    for each in comparison.by_run():
        sent = sent_bytes(each.runs)
        if sent is not None:
            points.append((each.values, sent))
    if not points:
        return LeftOut(slug, title, "no completed run has counted its communication")
    if not any(sum(sent.values()) for _, sent in points):
        return LeftOut(slug, title, "no run sent anything")
    keys = deciding_keys(points, comparison.varied)
    points.sort(key=lambda point: [natural(point[0].get(key)) for key in keys])
    rows: dict[str, dict[str, float]] = {}
    for values, sent in points:
        rows.setdefault(label_of({key: values[key] for key in keys if key in values}), sent)
    operations = sorted({operation for sent in rows.values() for operation in sent})
    parts = {operation: [sent.get(operation, 0.0) for sent in rows.values()] for operation in operations}
    note = "Input bytes of every call, also on one rank, where nothing is sent. Runs that put in the same have one bar."
    return Bars(slug, title, list(rows), [BarPanel("", "bytes per update and rank", parts)], note, named=True)


def sent_bytes(runs: list[Run]) -> dict[str, float] | None:
    """Bytes per update by operation, medians over the completed runs of a point; None if nothing was counted."""
    found = [run.summary.get("comm_bytes_per_step") for run in runs if run.status == "completed"]
    counted: list[dict[str, float]] = [each for each in found if each is not None]
    if not counted:
        return None
    return {
        key: statistics.median([each.get(key, 0.0) for each in counted])
        for key in sorted({k for each in counted for k in each})
    }


def memory_of(series: Series) -> tuple[float | None, ...]:
    """Bytes of each part; only asynchronous workers hold gradients back."""
    point = Point(series.runs)
    return tuple(point.median(key) or (0.0 if key.startswith("pending") else None) for key in MEMORY)


def close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether all numbers agree to 5 %."""
    return all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(one, other, strict=True))


def deciding_keys(
    points: list[tuple[dict[str, Any], Any]], keys: list[str], agree: Callable[[Any, Any], bool] = operator.eq
) -> list[str]:
    """The fewest keys that explain the values of the points: each of the others is dropped if nothing changes."""
    kept = list(keys)
    for key in reversed(keys):
        if key in (RANKS, "sharding"):
            continue
        rest = [each for each in kept if each != key]
        if explain(points, rest, agree):
            kept = rest
    return kept


def explain(points: list[tuple[dict[str, Any], Any]], keys: list[str], agree: Callable[[Any, Any], bool]) -> bool:
    """Whether points that are the same in ``keys`` agree in their value."""
    found: dict[Any, Any] = {}
    return all(
        agree(found.setdefault(tuple(values.get(key) for key in keys), value), value) for values, value in points
    )
