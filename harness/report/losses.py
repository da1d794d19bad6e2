"""The data of the loss curves: against samples, wall time, simulated time and batch size."""

from __future__ import annotations

import math
import warnings

import numpy as np

from harness.report.curves import Curve, LeftOut, Line, Mark, Panel, marks_of
from harness.report.record import Run
from harness.report.series import RANKS, Comparison, Series

MOST_POINTS = 200  # of a drawn loss curve; longer ones are averaged over equal numbers of updates

AXES = {
    "samples": ("loss_samples", "Training loss against samples", "samples (sequences)"),
    "wall_s": ("loss_wall_time", "Training loss against wall time", "wall time (s)"),
    "updates": ("loss_updates", "Training loss against weight updates", "weight updates"),
    "sim_time_s": ("loss_simulated_time", "Training loss against simulated time", "simulated time (s)"),
}


def against(comparison: Comparison, axis: str) -> Curve | LeftOut:
    """Loss of every point against a column of metrics.jsonl, median and range over seeds."""
    slug, title, x_label = AXES[axis]
    if axis in ("updates", "sim_time_s") and not synchrony_varies(comparison):
        return LeftOut(slug, title, "every run has the same synchrony")
    worlds = sorted({run.world_size or 0 for run in comparison.runs})
    colors: dict[str, int] = {}
    lines = []
    for each in comparison.by_run():
        without_world = str({key: value for key, value in each.values.items() if key != RANKS})
        color = colors.setdefault(without_world, len(colors))
        line = loss_line(each, axis, color, worlds.index(each.runs[0].world_size or 0))
        if line.x or line.marks:
            lines.append(line)
    if not any(line.x for line in lines):
        why = "no run has rows in metrics.jsonl"
        return LeftOut(slug, title, why)
    longest = max(len(run.metrics["loss"]) for run in comparison.runs)
    width = math.ceil(longest / MOST_POINTS)
    note = "Line: median over seeds, band: smallest to largest." if seeds_repeat(comparison) else ""
    if width > 1:
        note += f" Means over up to {width} updates."
    panel = Panel("", x_label, "training loss (nats/token)", lines, band=axis == "samples", zero=False)
    return Curve(slug, title, [panel], note.strip())


def synchrony_varies(comparison: Comparison) -> bool:
    """Whether updates and simulated time say anything that samples do not."""
    asynchronous = any(run.config.get("parallel.kind") == "async" for run in comparison.runs)
    return asynchronous or any(key.startswith("parallel.") for key in comparison.varied)


def seeds_repeat(comparison: Comparison) -> bool:
    return any(len(series.runs) > 1 for series in comparison.by_run())


def loss_line(series: Series, axis: str, color: int, dash: int) -> Line:
    """The loss curve of runs equal but for the seed; where runs stop early, the others go on."""
    line = Line(series.label, color=color, dash=dash, values=series.values)
    curves = []
    for run in series.runs:
        x, loss = (np.asarray(run.metrics[key], dtype=float) for key in (axis, "loss"))
        if not np.isfinite(x).any():
            continue
        curves.append((np.asarray(run.metrics["samples"], dtype=float), x, loss))
        if run.status not in ("completed", "running"):
            line.marks.append(last_mark(run, x, loss))
    if not curves:
        return line
    samples, columns = align(curves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an update in which no run has a finite loss
        place = samples if axis == "samples" else np.nanmedian(columns[:, 0], axis=0)
        values = [np.nanmedian(columns[:, 1], axis=0), *(f(columns[:, 1], axis=0) for f in (np.nanmin, np.nanmax))]
        width = math.ceil(len(samples) / MOST_POINTS)
        place, *values = (mean_of(each, width) for each in (place, *values))
    known = np.isfinite(place) & np.isfinite(values[0])
    line.x, line.y, line.low, line.high = (each[known].tolist() for each in (place, *values))
    return line


def last_mark(run: Run, x: np.ndarray, loss: np.ndarray) -> Mark:
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(loss))
    if not len(finite):
        return Mark(float(np.nanmax(x)), run.status)
    return Mark(float(x[finite[-1]]), run.status, y=float(loss[finite[-1]]))


def align(curves: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Samples that occur in any run, and per run its x and loss there, NaN where it has none: [runs, 2, samples]."""
    samples = np.unique(np.concatenate([samples for samples, _, _ in curves]))
    columns = np.full((len(curves), 2, len(samples)), np.nan)
    for row, (own, x, loss) in zip(columns, curves, strict=True):
        place = np.searchsorted(samples, own)
        row[0, place], row[1, place] = x, loss
    return samples, columns


def mean_of(values: np.ndarray, width: int) -> np.ndarray:
    """Means over ``width`` neighbours, the last over what is left."""
    if width <= 1:
        return values
    padded = np.append(values, np.full(-len(values) % width, np.nan))
    return np.nanmean(padded.reshape(-1, width), axis=1)


def against_batch_size(comparison: Comparison) -> Curve | LeftOut:
    """Final training loss, and evaluation loss where there is one, against the global batch size."""
    slug, title = "final_loss_batch_size", "Final loss against batch size"
    series = comparison.by_batch()
    if not any(len(each.by_batch()) >= 2 for each in series):
        return LeftOut(slug, title, "every series has one global batch size; it needs two")
    panels = []
    for key, label in (("final_loss", "training loss of the last update"), ("eval_loss", "evaluation loss")):
        lines = []
        for color, each in enumerate(series):
            points = each.by_batch()
            line = Line(each.label, color=color, marks=marks_of(points), values=each.values)
            for batch, point in points.items():
                value = point.spread(key)
                if value:
                    line.add(batch, value)
            lines.append(line)
        if any(line.x for line in lines):
            y_label = f"{label} (nats/token)"
            panels.append(Panel("", "global batch (sequences per update)", y_label, lines, steps=True, zero=False))
    if not panels:
        return LeftOut(slug, title, "no run has a final loss")
    return Curve(slug, title, panels, "Same number of samples unless the budget is a series of its own.")
