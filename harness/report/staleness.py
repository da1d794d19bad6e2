"""The data of the pictures of asynchrony: staleness against theory, and what it costs in tokens and saves in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from harness.asynchrony import break_even_overhead, geometric_staleness
from harness.report.curves import Curve, LeftOut, Line, Panel, marks_of
from harness.report.record import Run
from harness.report.scaling import spread
from harness.report.series import IGNORED, RANKS, Comparison, Series, label_of, natural

WORKERS = "parallel.workers"
# What decides over the staleness of a gradient; the rest of `parallel` does not.
DECIDING = tuple(
    f"parallel.{key}"
    for key in ("clock", "workers", "clock_cv", "speeds", "trace", "gradients_per_update", "max_staleness", "drain")
)
# Keys that do not change the loss at a number of samples.
NO_MATTER = (
    "parallel.",
    "zero.",
    "engine.",
    "checkpointing.",
    "launch.",
    "deepspeed.",
    "batch.micro",
    "batch.per_rank",
)
WINDOW = 0.1  # of a run, over which training losses are averaged before they are compared


def asynchronous(comparison: Comparison) -> list[Run]:
    return [run for run in comparison.runs if run.config.get("parallel.kind") == "async"]


def histogram(comparison: Comparison) -> Curve | LeftOut:
    """Share of the applied gradients by staleness, a panel per clock, against the law that theory knows."""
    slug, title = "staleness", "Staleness of the applied gradients"
    groups: dict[tuple[Hashable, ...], Counter[int]] = {}
    for run in asynchronous(comparison):
        counts = run.summary.get("staleness_histogram") or {}
        if counts:
            group = groups.setdefault(tuple(run.config.get(key) for key in DECIDING), Counter())
            group.update({int(staleness): int(count) for staleness, count in counts.items()})
    if not groups:
        return LeftOut(slug, title, "no asynchronous run has completed")
    panels, colors = [], dict[str, int]()
    for law in dict.fromkeys(key[0] for key in groups):
        of_law = {key: counts for key, counts in groups.items() if key[0] == law}
        varied = [
            i for i, values in enumerate(zip(*of_law, strict=True)) if len(set(values)) > 1 or DECIDING[i] == WORKERS
        ]
        lines = []
        for key, counts in sorted(of_law.items(), key=lambda group: [natural(value) for value in group[0]]):
            total = sum(counts.values())
            mean = sum(staleness * count for staleness, count in counts.items()) / total
            label = f"{label_of({DECIDING[i]: key[i] for i in varied})}: mean {mean:.2f}"
            places = [float(staleness) for staleness in range(max(counts) + 2)]
            shares = [counts[round(x)] / total for x in places]
            lines.append(Line(label, places, shares, shares, shares, color=colors.setdefault(label, len(colors))))
            settings = dict(zip(DECIDING, key, strict=True))
            if law == "exponential" and plain(settings):
                workers = int(str(settings[WORKERS]))
                expected = [geometric_staleness(workers, round(x)) for x in places]
                lines.append(Line("geometric, mean N - 1", places, expected, ideal=True))
        panels.append(Panel(f"{law} clock", "staleness (weight updates)", "share of the gradients", lines, "share"))
    note = "Each with one gradient per update has a mean of N - 1 in the limit, less while filling and draining."
    return Curve(slug, title, panels, note)


def plain(settings: dict[str, Hashable]) -> bool:
    """Whether workers are alike, unbounded, and every gradient is an update of its own."""
    return not settings["parallel.speeds"] and (
        settings["parallel.gradients_per_update"] == 1 and settings["parallel.max_staleness"] is None
    )


def token_overhead(run: Run, baseline: Run) -> float | None:
    """Samples that `run` needs over those of `baseline`, to the lower loss that both reach.

    By the evaluation loss where both have three evaluations, else by the training loss averaged over a tenth of the
    run. Above 1: `run` needs more.
    """
    key = "eval_loss" if all(evaluations(each) >= 3 for each in (run, baseline)) else "loss"
    curves = [loss_curve(each, key) for each in (run, baseline)]
    if any(len(loss) < 2 for _, loss in curves):
        return None
    target = max(loss.min() for _, loss in curves)
    needed, base = (samples_to(samples, loss, target) for samples, loss in curves)
    return needed / base


def evaluations(run: Run) -> int:
    return int(np.isfinite(np.asarray(run.metrics["eval_loss"])).sum())


def loss_curve(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Samples and losses; training losses are means over neighbours."""
    samples, loss = (np.asarray(run.metrics[each], dtype=float) for each in ("samples", key))
    known = np.isfinite(loss)
    samples, loss = samples[known], loss[known]
    width = max(1, round(WINDOW * len(loss))) if key == "loss" else 1
    kernel = np.full(width, 1 / width)
    return (np.convolve(samples, kernel, "valid"), np.convolve(loss, kernel, "valid")) if len(loss) else (samples, loss)


def samples_to(samples: np.ndarray, loss: np.ndarray, target: float) -> float:
    """Where a loss curve first comes down to `target`, between points in a straight line."""
    first = int(np.argmax(loss <= target))
    if first == 0:
        return float(samples[0])
    above, below = loss[first - 1], loss[first]
    return float(samples[first - 1] + (samples[first] - samples[first - 1]) * (above - target) / (above - below))


def same_but_synchrony(run: Run) -> Hashable:
    """What a run must share with the synchronous run that it is held against, the seed included."""
    return tuple(
        sorted(
            (key, str(value))
            for key, value in run.config.items()
            if key == "seed" or not (key.startswith(NO_MATTER) or IGNORED.match(key))
        )
    )


def overhead_lines(comparison: Comparison) -> list[tuple[Series, Line]]:
    """Token overhead against workers, a line per series; median and range over seeds."""
    baselines = {
        same_but_synchrony(run): run
        for run in comparison.runs
        if run.config.get("parallel.kind") == "sync" and run.status == "completed"
    }
    lines = []
    every = comparison.series(lambda run: (WORKERS, RANKS))
    for number, series in enumerate(each for each in every if each.runs[0].config.get("parallel.kind") == "async"):
        values = {key: value for key, value in series.values.items() if key != "parallel.kind"}
        points = series.points(lambda run: run.config.get(WORKERS))
        line = Line(label_of(values) if values else "async", color=number, marks=marks_of(points), values=values)
        for workers, point in points.items():
            pairs = [(run, baselines.get(same_but_synchrony(run))) for run in point.completed]
            value = spread(token_overhead(run, base) for run, base in pairs if base is not None)
            if value:
                line.add(workers, value)
        if line.x:
            lines.append((series, line))
    return lines


def token_overheads(comparison: Comparison) -> Curve | LeftOut:
    """Samples to equal loss over those of sync, against workers."""
    slug, title = "token_overhead", "Token overhead of asynchrony at equal loss"
    found = overhead_lines(comparison)
    if not found:
        return LeftOut(slug, title, "no asynchronous run completed beside a synchronous one of equal settings and seed")
    lines = [line for _, line in found]
    ends = [min(line.x[0] for line in lines), max(line.x[-1] for line in lines)]
    panel = Panel("", "logical workers", "samples / samples of sync", lines, "ratio", steps=True, zero=False)
    panel.lines.append(Line("sync", ends, [1.0, 1.0], ideal=True))
    return Curve(slug, title, [panel], OVERHEAD_NOTE)


OVERHEAD_NOTE = "Samples computed until the lower loss that a run and its synchronous twin of equal seed both reach."


def break_even(comparison: Comparison) -> Curve | LeftOut:
    """Token overhead against what asynchrony saves in time, E[slowest of N] / E[one], a panel per law of times."""
    slug, title = "break_even", "Does asynchrony pay?"
    panels: dict[tuple[str, float], Panel] = {}
    colors: dict[str, int] = {}
    for series, line in overhead_lines(comparison):
        law, cv = str(series.runs[0].config["parallel.clock"]), float(series.runs[0].config["parallel.clock_cv"])
        if law == "trace" or series.runs[0].config["parallel.speeds"]:
            continue
        cv = cv if law in ("lognormal", "stragglers") else 0.0
        name = f"{law} clock" + (f", cv {cv:g}" if cv else "")
        panel = panels.setdefault(
            (law, cv), Panel(name, "logical workers", "time or samples, over sync", [], "ratio", steps=True, zero=False)
        )
        line.values = {key: value for key, value in line.values.items() if key != "parallel.clock"}
        line.label = label_of(line.values) if line.values else "async"
        line.color = colors.setdefault(line.label, len(colors))
        panel.lines.append(line)
    if not panels:
        return LeftOut(slug, title, "no token overhead is known for a law of times that theory covers")
    for (law, cv), panel in panels.items():
        workers = range(1, int(max(line.x[-1] for line in panel.lines)) + 1)
        saved = [break_even_overhead(law, n, cv) for n in workers]
        panel.lines.append(Line("E[slowest of N] / E[one]", [float(n) for n in workers], saved, ideal=True))
    note = f"{OVERHEAD_NOTE} Asynchrony pays where they lie below the grey line; compute alone, communication ignored."
    return Curve(slug, title, list(panels.values()), note)
