"""The data of the scaling curves: tokens/s, speed-up and efficiency against ranks."""

from __future__ import annotations

from collections.abc import Callable

from harness.report.curves import RANKS_LABEL, Curve, LeftOut, Line, Panel, marks_of
from harness.report.scaling import (
    Spread,
    batch_efficiency,
    speed_up,
    spread,
    strong_efficiency,
    weak_efficiency,
)
from harness.report.series import Series, label_of

KINDS = {
    "strong": "strong scaling: the global batch stays",
    "weak": "weak scaling: the batch of a rank stays",
}


def several_worlds(series: list[Series]) -> list[Series]:
    """The series that make a scaling curve possible: measured at two world sizes or more; [] if there is none."""
    measured = [each for each in series if len(measured_rates(each)) >= 2]
    return series if measured else []


def measured_rates(series: Series) -> dict[int, Spread]:
    """Tokens/s of all ranks, by world size, over the completed runs of a series."""
    rates = {ranks: point.spread("tokens_per_s") for ranks, point in series.by_ranks().items()}
    return {ranks: rate for ranks, rate in rates.items() if rate is not None and rate.low > 0}


def why_no_scaling(series: list[Series]) -> str:
    worlds = sorted({ranks for each in series for ranks in each.by_ranks()})
    if len(worlds) < 2:
        return f"every run has {worlds[0] if worlds else 'no'} rank{'' if worlds == [1] else 's'}; it needs two world sizes"
    return "no series completed at two world sizes"


def by_kind(
    series: list[Series], y_label: str, fill: Callable[[Series, Line], None], quantity: str = "number"
) -> list[Panel]:
    """A panel for strong and one for weak scaling, each with a line per series that ``fill`` puts numbers into."""
    panels = []
    colors: dict[str, int] = {}
    for kind, title in KINDS.items():
        lines = []
        for each in series:
            if each.kind != kind:
                continue
            line = line_of(each, colors)
            line.marks = marks_of(each.by_ranks())
            fill(each, line)
            if line.x or line.marks:
                lines.append(line)
        if any(line.x for line in lines):
            panels.append(Panel(title, RANKS_LABEL, y_label, lines, quantity, steps=True))
    return panels


def line_of(series: Series, colors: dict[str, int], suffix: str = "") -> Line:
    """An empty line; its panel says whether it is strong or weak scaling, so its label and colour do not."""
    values = {key: value for key, value in series.values.items() if key != "batch.kind"}
    label = series.label if len(values) == len(series.values) else label_of(values)
    return Line(label + suffix, color=colors.setdefault(label, len(colors)), values=values, suffix=suffix)


def tokens_per_s(series: list[Series]) -> Curve | LeftOut:
    slug, title = "tokens_per_s", "Throughput against ranks"
    if not several_worlds(series):
        return LeftOut(slug, title, why_no_scaling(series))

    def fill(each: Series, line: Line) -> None:
        for ranks, rate in measured_rates(each).items():
            line.add(ranks, rate)

    panels = by_kind(series, "tokens/s, all ranks", fill)
    for panel in panels:
        panel.lines += ideal_rates(panel.lines)
    return Curve(slug, title, panels, "Grey: linear in the ranks, from the smallest world of each series.")


def ideal_rates(lines: list[Line]) -> list[Line]:
    reach = max(x for line in lines for x in line.x)
    return [
        Line("linear", [line.x[0], reach], [line.y[0], line.y[0] * reach / line.x[0]], ideal=True, values=line.values)
        for line in lines
        if len(line.x) >= 2
    ]


def speed_ups(series: list[Series]) -> Curve | LeftOut:
    slug, title = "speed_up", "Speed-up against ranks"
    if not several_worlds(series):
        return LeftOut(slug, title, why_no_scaling(series))

    def fill(each: Series, line: Line) -> None:
        for ranks, value in relative(each, lambda rate, base, ranks, base_ranks: speed_up(rate, base)).items():
            line.add(ranks, value)

    panels = by_kind(series, "speed-up over the smallest world", fill)
    for panel in panels:
        reach = max(x for line in panel.lines for x in line.x)
        starts = sorted({line.x[0] for line in panel.lines if line.x})
        label = "ideal" if len(starts) == 1 else "ideal, per baseline"
        panel.lines += [Line(label, [start, reach], [1.0, reach / start], ideal=True) for start in starts]
    return Curve(slug, title, panels, baselines(series))


def efficiencies(series: list[Series]) -> Curve | LeftOut:
    slug, title = "efficiency", "Scaling efficiency against ranks"
    if not several_worlds(series):
        return LeftOut(slug, title, why_no_scaling(series))

    def fill(each: Series, line: Line) -> None:
        for ranks, value in efficiency(each).items():
            line.add(ranks, value)

    panels = by_kind(series, "efficiency", fill, "percent")
    for panel in panels:
        panel.y_label = {
            KINDS["strong"]: "strong efficiency: N0 T0 / (N T), T the step time, 0 the smallest world",
            KINDS["weak"]: "weak efficiency (rate per rank kept)",
        }[panel.title]
        add_ideal(panel)
    return Curve(slug, title, panels, baselines(series))


def time_to_loss_efficiencies(series: list[Series]) -> Curve | LeftOut:
    slug, title = "time_to_loss_efficiency", "Efficiency towards a loss against ranks"
    if not any(critical_batch_size(each) for each in series):
        return LeftOut(slug, title, "no run knows its critical batch size (critical_batch_size in summary.json)")
    if not several_worlds(series):
        return LeftOut(slug, title, why_no_scaling(series))
    panels = []
    colors: dict[str, int] = {}
    sizes = set()
    for kind, kind_title in KINDS.items():
        lines = []
        for each in series:
            critical = critical_batch_size(each)
            hardware = efficiency(each)
            if each.kind != kind or critical is None or not hardware:
                continue
            sizes.add(f"{critical:.0f}")
            alone, both = line_of(each, colors), line_of(each, colors, " towards a loss")
            both.dash = 1
            points = each.by_ranks()
            for ranks, value in hardware.items():
                batch = points[ranks].runs[0].global_batch_size
                assert batch is not None
                alone.add(ranks, value)
                both.add(ranks, value.times(batch_efficiency(batch, critical)))
            lines += [alone, both]
        if lines:
            panels.append(Panel(kind_title, RANKS_LABEL, "efficiency", lines, "percent", steps=True))
    for panel in panels:
        add_ideal(panel)
    note = (
        f"Towards a loss: scaling efficiency times 1/(1 + B/B_crit), the samples that a large batch does not waste; "
        f"B_crit = {' or '.join(sorted(sizes))} sequences."
    )
    return Curve(slug, title, panels, note) if panels else LeftOut(slug, title, "no series has an efficiency")


def add_ideal(panel: Panel) -> None:
    xs = [x for line in panel.lines for x in line.x]
    panel.lines.append(Line("ideal", [min(xs), max(xs)], [1.0, 1.0], ideal=True))


def critical_batch_size(series: Series) -> float | None:
    """Sequences; the median over the runs of a series that know it."""
    known = spread(run.number("critical_batch_size") or None for run in series.runs if run.status == "completed")
    return known.median if known and known.median > 0 else None


def relative(series: Series, of: Callable[[float, float, int, int], float]) -> dict[int, Spread]:
    """``of(rate, baseline rate, ranks, baseline ranks)`` by world size; empty without a second world size.

    The baseline is the median of the series' smallest completed world.
    """
    rates = measured_rates(series)
    if len(rates) < 2:
        return {}
    smallest = min(rates)
    base = rates[smallest].median
    found = {}
    for ranks, rate in rates.items():
        median, low, high = (of(value, base, ranks, smallest) for value in (rate.median, rate.low, rate.high))
        found[ranks] = Spread(median, low, high, rate.count)
    return found


def efficiency(series: Series) -> dict[int, Spread]:
    """Strong or weak efficiency, as the series is, by world size; the baseline's is 1."""
    if series.kind == "strong":  # the same tokens at every world size: a time is one over a rate
        return relative(series, lambda rate, base, ranks, fewest: strong_efficiency(ranks, 1 / rate, fewest, 1 / base))
    return relative(series, lambda rate, base, ranks, fewest: weak_efficiency(rate / ranks, base / fewest))


def baselines(series: list[Series]) -> str:
    smallest = sorted({min(rates) for each in series if len(rates := measured_rates(each)) >= 2})
    alone = [each.label for each in series if len(measured_rates(each)) == 1]
    note = f"Baseline: the smallest completed world of the same series ({' or '.join(map(str, smallest))} ranks)."
    return note + (
        f" No baseline, hence no line: {'; '.join(alone[:5])}{' …' if len(alone) > 5 else ''}." if alone else ""
    )
