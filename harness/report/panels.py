"""Draws one panel of lines: axes, spread, what did not complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.curves import Line, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by the colour-blind; its yellow is too pale for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
GREY = "#777777"
STATUS_NAMES = {"oom": "OOM"}
SHORT_NAMES = {"oom": "OOM", "diverged": "div.", "failed": "fail", "timeout": "time", "killed": "kill"}
MOST_LABELLED = 10  # lines on a panel that get a colour and a legend entry each


def gradient_label(count: int) -> str:
    return f"… {count} in all, first dark, last light"


def draw_panel(axis: Axes, panel: Panel) -> dict[str, Any]:
    """Draw one panel; returns the handles of its lines by label."""
    from matplotlib import colormaps

    if panel.points:
        return draw_points(axis, panel)
    measured = [line for line in panel.lines if not line.ideal]
    scale, y_label = unit_of(panel.quantity, panel.y_label, [y for line in measured for y in line.high or line.y])
    gradient = colormaps["viridis"] if len(measured) > MOST_LABELLED else None
    spreads = any(high > low for line in measured for low, high in zip(line.low, line.high, strict=True))
    entries: dict[str, Any] = {}
    if panel.steps:
        axis.set_xscale("log", base=2)
    for line in panel.lines:
        if line.ideal:
            y = [value * scale for value in line.y]
            entries[line.label] = axis.plot(line.x, y, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=3)[0]
    for number, line in enumerate(measured):
        shift = 2 ** ((number - (len(measured) - 1) / 2) * 0.03) if panel.steps and spreads and not gradient else 1.0
        color = gradient(number / (len(measured) - 1)) if gradient else COLORS[line.color % len(COLORS)]
        dash = DASHES[(line.dash + line.color // len(COLORS)) % len(DASHES)] if not gradient else "-"
        width = 0.9 if gradient else 2.8 - 1.8 * number / max(1, len(measured) - 1)  # lines that coincide stay visible
        marker = MARKERS[line.color % len(MARKERS)] if panel.steps else ""
        x, y = [place * shift for place in line.x], [value * scale for value in line.y]
        entries[line.label] = axis.plot(
            x, y, color=color, linestyle=dash, linewidth=width, marker=marker, markersize=5
        )[0]
        low, high = ([value * scale for value in values] for values in (line.low, line.high))
        if spreads and panel.band:
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        elif spreads and panel.steps:
            reach = [[m - e for m, e in zip(y, low, strict=True)], [e - m for m, e in zip(y, high, strict=True)]]
            axis.errorbar(x, y, yerr=reach, fmt="none", ecolor=color, elinewidth=1, capsize=2.5)
    if gradient:
        entries[gradient_label(len(measured))] = axis.plot([], [], alpha=0)[0]
    set_scale(axis, panel, measured, scale)
    draw_ended_curves(axis, measured, scale)
    draw_missing_points(axis, measured)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(y_label)
    return entries


def draw_points(axis: Axes, panel: Panel) -> dict[str, Any]:
    """Draw one quantity against another of the same unit; returns the handles by label."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [value for line in panel.lines for value in (*line.x, *line.y)]
    scale, y_label = unit_of(panel.quantity, panel.y_label, values)
    _, x_label = unit_of(panel.quantity, panel.x_label, values)
    entries: dict[str, Any] = {}
    for line in panel.lines:
        x, y = [value * scale for value in line.x], [value * scale for value in line.y]
        if line.ideal:
            entries[line.label] = axis.plot(x, y, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)[0]
            continue
        color, marker = COLORS[line.color % len(COLORS)], MARKERS[line.color % len(MARKERS)]
        entries[line.label] = axis.plot(
            x, y, color=color, linestyle="none", marker=marker, markersize=6, alpha=0.75, markeredgewidth=0
        )[0]
    low, high = min(values) * scale / 1.5, max(values) * scale * 1.5
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        each.set_major_formatter(FuncFormatter(plain))
        each.set_minor_formatter(NullFormatter())
    axis.set_title(panel.title)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    return entries


def set_scale(axis: Axes, panel: Panel, measured: list[Line], scale: float) -> None:
    """Ticks at the sizes that were run, and a y-axis that neither a diverged run nor a wide range makes unreadable."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

    if panel.steps:
        places = {x for line in measured for x in line.x}
        missing = {mark.x for line in measured for mark in line.marks}
        axis.xaxis.set_major_locator(FixedLocator(apart(sorted(places), sorted(missing - places))))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlim(min(places | missing) / 1.25, max(places | missing) * 1.3)
    else:
        axis.xaxis.set_major_formatter(FuncFormatter(short))
        axis.margins(x=0.02)
    if panel.quantity == "percent":
        axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif panel.quantity == "number" and panel.zero:
        axis.yaxis.set_major_formatter(FuncFormatter(short))
    values = [value * scale for line in measured for value in line.y if value > 0]
    if panel.zero and panel.steps and values and panel.quantity != "percent" and max(values) > 20 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(short) if panel.quantity == "number" else FuncFormatter(plain))
    elif panel.zero:
        axis.set_ylim(bottom=0, top=max([1.0 if panel.quantity == "percent" else 0, *axis.get_ylim()]) * 1.06)
    else:
        low, high = calm_range(panel.lines if panel.steps else measured, panel.steps)
        if high > low:
            axis.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def calm_range(lines: list[Line], points: bool) -> tuple[float, float]:
    """The range of what did not diverge; if every curve did, up to half above where they started."""
    calm = [line for line in lines if points or not line.marks]
    values = [value for line in calm for value in (line.y if line.ideal else (*line.low, *line.high))]
    if values:
        return min(values), max(values)
    lows = [value for line in lines for value in line.y]
    return (min(lows), 1.5 * max(line.y[0] for line in lines if line.y)) if lows else (0.0, 0.0)


def apart(places: list[float], missing: list[float]) -> list[float]:
    """Ticks whose labels do not touch on an axis of doublings: first those of what was measured."""
    ticks: list[float] = []
    reach = max(places + missing) / min(places + missing)
    least = max(1.12, reach ** (1 / 14))
    for place in places + missing:
        if all(max(place, tick) / min(place, tick) >= least for tick in ticks):
            ticks.append(place)
    return sorted(ticks)


def short(value: float, _: int) -> str:
    """A tick's label with k, M or G for thousands."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def plain(value: float, _: Any) -> str:
    return f"{value:g}"


def draw_ended_curves(axis: Axes, measured: list[Line], scale: float) -> None:
    """A cross where a run stopped before its end, at the upper edge where its curve left the picture."""
    top, right = axis.get_ylim()[1], axis.get_xlim()[0] + 0.85 * (axis.get_xlim()[1] - axis.get_xlim()[0])
    for line in measured:
        color = COLORS[line.color % len(COLORS)]
        named: set[str] = set()
        for mark in line.marks:
            if mark.y is None:
                continue
            x, y = mark.x, mark.y * scale
            if y > top:
                inside = [place for place, value in zip(line.x, line.y, strict=True) if value * scale <= top]
                x, y = min(x, max(inside, default=x)), top
            axis.plot([x], [y], marker="X", markersize=8, color=color, markeredgecolor="white", clip_on=False, zorder=5)
            if mark.status in named:
                continue
            named.add(mark.status)
            count = sum(each.status == mark.status for each in line.marks)
            axis.annotate(
                counted(mark.status, count), (x, y), (-7 if x > right else 7, -11), textcoords="offset points",
                ha="right" if x > right else "left", fontsize=7, color=color, annotation_clip=False,
                bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},
            )  # fmt: skip


def draw_missing_points(axis: Axes, measured: list[Line]) -> None:
    """Points that did not complete, in a strip below the axes' range of their own."""
    from matplotlib.ticker import FixedLocator, NullLocator

    stacks: dict[float, list[tuple[str, int, int]]] = {}
    for line in measured:
        for mark in line.marks:
            if mark.y is None:
                stacks.setdefault(mark.x, []).append((mark.status, mark.count, line.color))
    if not stacks:
        return
    for x, marks in stacks.items():
        if len(marks) > 4:
            statuses = dict.fromkeys(status for status, _, _ in marks)
            stacks[x] = [(name, sum(n for s, n, _ in marks if s == name), len(COLORS) - 1) for name in statuses]
    share = 0.02 + 0.065 * max(map(len, stacks.values()))
    bottom, top = axis.get_ylim()
    axis.yaxis.set_major_locator(FixedLocator([tick for tick in axis.get_yticks() if bottom <= tick <= top]))
    axis.yaxis.set_minor_locator(NullLocator())
    if axis.get_yscale() == "log":
        below = bottom * (bottom / top) ** (share / (1 - share))
    else:
        below = bottom - (top - bottom) * share / (1 - share)
    axis.set_ylim(below, top)
    axis.axhspan(below, bottom, color="#F2F2F2", zorder=0)
    place_of = axis.get_xaxis_transform()
    names = STATUS_NAMES if len({x for line in measured for x in line.x} | set(stacks)) <= 6 else SHORT_NAMES
    left, right = axis.get_xlim()
    axis.set_xlim(left, max(right, max(stacks) * (max(stacks) / left) ** 0.22))  # room for the text of the last
    for x, marks in stacks.items():
        for level, (status, count, number) in enumerate(marks):
            color = COLORS[number % len(COLORS)]
            height = 0.035 + 0.065 * level
            axis.plot([x], [height], marker="X", markersize=7, color=color, markeredgecolor="white", transform=place_of)
            axis.annotate(
                counted(status, count, names), (x, height), (6, 0), xycoords=place_of, textcoords="offset points",
                va="center", fontsize=7, color=color,
            )  # fmt: skip


def counted(status: str, count: int, names: dict[str, str] | None = None, always: bool = False) -> str:
    name = (names or STATUS_NAMES).get(status, status)
    return name if count == 1 and not always else f"{count} {name}"


def unit_of(quantity: str, label: str, values: list[float]) -> tuple[float, str]:
    """The factor from base units to those of the axis, and the axis' label with that unit."""
    largest = max(values, default=0.0)
    if quantity == "bytes":
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if largest >= size:
                return 1 / size, label.replace("bytes", unit)
    if quantity == "seconds" and largest < 1:
        return 1000.0, label.replace("(s)", "(ms)")
    return 1.0, label
