"""Draws curves, bars and the status matrix with matplotlib. Every picture names hardware, versions and units."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report.curves import Bars, Curve, Line, Matrix, Panel, Picture, split_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by the colour-blind; its yellow is too pale for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
GREY = "#777777"
STATUS_COLORS = {
    "completed": "#9FD8C5", "running": "#CFE8F7", "oom": "#D55E00", "diverged": "#CC79A7", "failed": "#000000",
    "timeout": "#E69F00", "killed": "#999999",
}  # fmt: skip
STATUS_NAMES = {"oom": "OOM"}
MOST_LABELLED = 10  # lines on a panel that get a colour and a legend entry each
MOST_ROWS = 60
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "figure.titlesize": 11, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "hatch.linewidth": 0.5,
    "svg.hashsalt": "harness", "figure.dpi": 110, "axes.axisbelow": True,
    "text.parse_math": False,
}  # fmt: skip


def draw(picture: Picture, title: str, footer: str, folder: Path) -> None:
    """Write ``<slug>.png`` and ``<slug>.svg``.

    Args:
        title: what was studied; stands behind the picture's own title.
        footer: hardware and versions, below the axes.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context(STYLE):
        heading = f"{picture.title}: {title}" if title else picture.title
        if isinstance(picture, Curve):
            figure = draw_curve(picture, heading, footer)
        elif isinstance(picture, Bars):
            figure = draw_bars(picture, heading, footer)
        else:
            figure = draw_matrix(picture, heading, footer)
        FigureCanvasAgg(figure)
        figure.savefig(folder / f"{picture.slug}.png", metadata={"Software": None})
        figure.savefig(folder / f"{picture.slug}.svg", metadata={"Date": None})


def new_figure(width: float, height: float, heading: str, note: str, footer: str) -> Figure:
    """An empty figure with its heading, and its note and footer below a band kept free for them. Sizes in inches."""
    from matplotlib.figure import Figure

    small = 6.5
    lines = [line for text in (note, footer) if text for line in textwrap.wrap(text, int(width * 19))]
    below = (len(lines) * small * 1.35 + 8) / 72
    headline = textwrap.fill(heading, int(width * 11))
    above = (headline.count("\n") + 1) * 14 / 72 + 0.08
    height += below + above
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, below / height, 1, 1 - (below + above) / height))  # type: ignore[union-attr, call-arg]
    figure.text(0.5, 1 - 0.06 / height, headline, ha="center", va="top", fontsize=11)
    figure.text(0.08 / width, 5 / 72 / height, "\n".join(lines), fontsize=small, va="bottom", color="#444444")
    return figure


def draw_curve(curve: Curve, heading: str, footer: str) -> Figure:
    panels = [part for panel in curve.panels for part in split_panel(panel)]
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    entries: dict[str, Any] = {}
    labels = [line.label for panel in panels for line in panel.lines]
    width = 7.0 if columns == 1 else 5.0 * columns
    legend_columns = max(1, min(4, int(width * 10 // (max(map(len, labels), default=1) + 6))))
    legend_rows = -(-min(len(dict.fromkeys(labels)), 24) // legend_columns)
    figure = new_figure(width, 3.5 * rows + 0.17 * legend_rows, heading, curve.note, footer)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in axes[len(panels) :]:
        empty.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        entries |= draw_panel(axis, panel)
    if list(entries) != ["all runs"]:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=legend_columns, frameon=False
        )
    return figure


def draw_panel(axis: Axes, panel: Panel) -> dict[str, Any]:
    """Draw one panel; returns the handles of its legend by label."""
    from matplotlib import colormaps

    measured = [line for line in panel.lines if not line.ideal]
    scale, y_label = unit_of(panel.quantity, panel.y_label, [y for line in measured for y in line.high or line.y])
    gradient = colormaps["viridis"] if len(measured) > MOST_LABELLED else None
    shown = range(len(measured))
    if gradient:
        shown = range(0, len(measured), -(-len(measured) // 8))
    spreads = any(high > low for line in measured for low, high in zip(line.low, line.high, strict=True))
    entries: dict[str, Any] = {}
    if panel.steps:
        axis.set_xscale("log", base=2)
    for line in panel.lines:
        if line.ideal:
            (handle,) = axis.plot(
                line.x, [y * scale for y in line.y], color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1
            )
            entries[line.label] = handle
    for number, line in enumerate(measured):
        shift = 2 ** ((number - (len(measured) - 1) / 2) * 0.05) if panel.steps and spreads and not gradient else 1.0
        color = gradient(number / (len(measured) - 1)) if gradient else COLORS[line.color % len(COLORS)]
        dash = DASHES[(line.dash + line.color // len(COLORS)) % len(DASHES)] if not gradient else "-"
        width = 0.9 if gradient else 2.4 - 1.4 * number / max(1, len(measured) - 1)  # lines that coincide stay visible
        marker = MARKERS[line.color % len(MARKERS)] if panel.steps else ""
        x, y = [place * shift for place in line.x], [value * scale for value in line.y]
        (handle,) = axis.plot(x, y, color=color, linestyle=dash, linewidth=width, marker=marker, markersize=5)
        if spreads:
            low, high = ([value * scale for value in values] for values in (line.low, line.high))
            if panel.band:
                axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            else:
                reach = [[m - e for m, e in zip(y, low, strict=True)], [e - m for m, e in zip(y, high, strict=True)]]
                axis.errorbar(x, y, yerr=reach, fmt="none", ecolor=color, elinewidth=1, capsize=2.5)
        if number in shown:
            entries[line.label] = handle
    if gradient:
        entries[f"… {len(measured)} in all, from first (dark) to last (light)"] = axis.plot([], [], alpha=0)[0]
    set_scale(axis, panel, measured, scale)
    draw_marks(axis, panel, measured, scale)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(y_label)
    return entries


def set_scale(axis: Axes, panel: Panel, measured: list[Line], scale: float) -> None:
    """Ticks at the sizes that were run, and a y-axis that neither a diverged run nor a wide range makes unreadable."""
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator, PercentFormatter

    if panel.steps:
        places = {x for line in measured for x in line.x} | {mark.x for line in measured for mark in line.marks}
        axis.xaxis.set_major_locator(FixedLocator(sorted(places)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlim(min(places) / 1.25, max(places) * 1.35)
        if len(places) > 12:
            axis.tick_params(axis="x", rotation=60)
    else:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.margins(x=0.02)
    if panel.quantity == "percent":
        axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif panel.quantity == "number" and panel.zero:
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    values = [value * scale for line in measured for value in line.y if value > 0]
    if panel.zero and panel.steps and values and panel.quantity != "percent" and max(values) > 20 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(EngFormatter(sep="") if panel.quantity == "number" else FuncFormatter(plain))
    elif panel.zero:
        axis.set_ylim(bottom=0, top=max([1.0 if panel.quantity == "percent" else 0, *axis.get_ylim()]) * 1.06)
    else:
        calm = [value for line in measured if not line.marks or panel.steps for value in line.high or line.y]
        if calm and max(calm) > min(calm):
            margin = 0.06 * (max(calm) - min(calm))
            axis.set_ylim(min(calm) - margin, max(calm) + margin)


def plain(value: float, _: Any) -> str:
    return f"{value:g}"


def draw_marks(axis: Axes, panel: Panel, measured: list[Line], scale: float) -> None:
    """Points that did not complete: where their curve ended, or one above the other at the lower edge."""
    stacked: dict[float, list[tuple[str, int, int]]] = {}
    for line in measured:
        for mark in line.marks:
            if mark.y is None:
                stacked.setdefault(mark.x, []).append((mark.status, mark.count, line.color))
                continue
            y = min(max(mark.y * scale, axis.get_ylim()[0]), axis.get_ylim()[1])
            color = COLORS[line.color % len(COLORS)]
            axis.plot(
                [mark.x], [y], marker="X", markersize=8, color=color, markeredgecolor="white", clip_on=False, zorder=5
            )
            axis.annotate(
                status_name(mark.status), (mark.x, y), (4, -9), textcoords="offset points", fontsize=7, color=color,
                annotation_clip=False,
            )  # fmt: skip
    for x, marks in stacked.items():
        if len(marks) > 4:
            counts: dict[str, int] = {}
            for status, count, _ in marks:
                counts[status] = counts.get(status, 0) + count
            marks = [(status, count, len(COLORS) - 1) for status, count in counts.items()]
        for height, (status, count, number) in enumerate(marks):
            color = COLORS[number % len(COLORS)]
            place = 0.035 + 0.062 * height
            transform = axis.get_xaxis_transform()
            axis.plot(
                [x],
                [place],
                marker="X",
                markersize=7,
                color=color,
                markeredgecolor="white",
                transform=transform,
                zorder=5,
            )
            text = status_name(status) + (f" ×{count}" if count > 1 else "")  # noqa: RUF001
            axis.annotate(
                text, (x, place), (5, 0), xycoords=transform, textcoords="offset points", va="center", fontsize=7,
                color=color,
            )  # fmt: skip


def draw_bars(bars: Bars, heading: str, footer: str) -> Figure:
    """Horizontal bars, one row per point, the panels side by side."""
    rows, note = bars.rows[:MOST_ROWS], bars.note
    if len(bars.rows) > MOST_ROWS:
        note = f"The first {MOST_ROWS} of {len(bars.rows)} rows; all of them are in table.csv. {note}"
    names = ["\n".join(textwrap.wrap(row, 42)) for row in rows]
    width = 7.5 if len(bars.panels) == 1 else 3.0 + 2.9 * len(bars.panels)
    figure = new_figure(width, 1.3 + 0.3 * len(rows) + 0.1 * sum(n.count("\n") for n in names), heading, note, footer)
    axes = figure.subplots(1, len(bars.panels), squeeze=False, sharey=True)[0]
    entries: dict[str, Any] = {}
    places = list(range(len(rows)))
    for axis, panel in zip(axes, bars.panels, strict=True):
        parts = {name: values[:MOST_ROWS] for name, values in panel.parts.items()}
        reach = panel.reach[:MOST_ROWS]
        totals = [sum(values) for values in zip(*parts.values(), strict=True)]
        scale, x_label = unit_of(panel.quantity, panel.x_label, [*totals, *reach])
        left = [0.0] * len(rows)
        for number, (name, values) in enumerate(parts.items()):
            widths = [value * scale for value in values]
            entries[name] = axis.barh(
                places, widths, 0.7, left=left, color=COLORS[number % len(COLORS)], alpha=0.85, edgecolor="white",
                hatch=HATCHES[number % len(HATCHES)],
            )  # fmt: skip
            left = [start + width for start, width in zip(left, widths, strict=True)]
        if reach:
            ends = [max(0.0, end * scale - start) for end, start in zip(reach, left, strict=True)]
            axis.errorbar(
                left, places, xerr=[[0.0] * len(rows), ends], fmt="none", ecolor="black", elinewidth=1, capsize=3
            )
            left = [start + end for start, end in zip(left, ends, strict=True)]
        for place, (end, total) in enumerate(zip(left, totals, strict=True)):
            axis.annotate(
                f"{total * scale:.3g}", (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
        if panel.ideal is not None:
            axis.axvline(panel.ideal * scale, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
        axis.set_xlim(0, max([*left, 0]) * 1.18 or 1)
        axis.set_title(panel.title)
        axis.set_xlabel(x_label)
        axis.grid(False, axis="y")
    axes[0].set_yticks(places, names)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    if any(len(panel.parts) > 1 for panel in bars.panels):
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_matrix(matrix: Matrix, heading: str, footer: str) -> Figure:
    """A row per series and a column per size; a cell is divided among the statuses of its runs."""
    from matplotlib.patches import Rectangle

    rows, cells, note = fold(matrix)
    names = ["\n".join(textwrap.wrap(row, 42)) for row in rows]
    figure = new_figure(
        max(7.0, 3.2 + 1.15 * len(matrix.columns)),
        1.1 + 0.34 * len(rows) + 0.1 * sum(n.count("\n") for n in names), heading, note, footer,
    )  # fmt: skip
    axis = figure.subplots()
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            total, start = sum(cell.values()), x - 0.5
            for status in sorted(cell, key=list(STATUS_COLORS).index):
                share = cell[status] / total
                axis.add_patch(Rectangle((start, y - 0.5), share, 1, facecolor=STATUS_COLORS[status], linewidth=0))
                text = status_name(status) if cell[status] == 1 else f"{cell[status]} {status_name(status)}"
                color = "white" if status in ("failed", "oom") else "black"
                size = 7.5 if share > 0.6 else max(4.0, 8.5 * share)
                axis.text(start + share / 2, y, text, ha="center", va="center", fontsize=size, color=color)
                start += share
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=2))
            if not cell:
                axis.text(x, y, "not run", fontsize=7, ha="center", va="center", color=GREY)
    axis.set_xlim(-0.5, len(matrix.columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks(range(len(matrix.columns)), matrix.columns)
    axis.set_yticks(range(len(rows)), names)
    axis.set_xlabel(matrix.x_label)
    axis.grid(False)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return figure


def fold(matrix: Matrix) -> tuple[list[str], list[list[dict[str, int]]], str]:
    """Rows, cells and note; in a long matrix the rows in which everything completed become one."""
    if len(matrix.rows) <= MOST_ROWS:
        return matrix.rows, matrix.cells, matrix.note
    calm = [all(status == "completed" for cell in row for status in cell) for row in matrix.cells]
    rows = [name for name, quiet in zip(matrix.rows, calm, strict=True) if not quiet]
    cells = [row for row, quiet in zip(matrix.cells, calm, strict=True) if not quiet]
    together: list[dict[str, int]] = [{} for _ in matrix.columns]
    for row, quiet in zip(matrix.cells, calm, strict=True):
        for column, cell in enumerate(row if quiet else []):
            if cell:
                together[column]["completed"] = together[column].get("completed", 0) + cell["completed"]
    if any(calm):
        rows, cells = [f"{sum(calm)} series, all completed", *rows], [together, *cells]
    return rows, cells, "Series in which every run completed share the first row."


def status_name(status: str) -> str:
    return STATUS_NAMES.get(status, status)


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
