"""Draws curves, bars and the status matrix with matplotlib. Every picture names hardware, versions and units."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report.curves import BarPanel, Bars, Curve, Matrix, Panel, Picture, split_panel
from harness.report.panels import COLORS, GREY, MOST_LABELLED, counted, draw_panel, gradient_label, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
STATUS_COLORS = {
    "completed": "#9FD8C5", "running": "#CFE8F7", "oom": "#F0A070", "diverged": "#DDA3C3", "failed": "#333333",
    "timeout": "#E69F00", "killed": "#999999",
}  # fmt: skip
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
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    with matplotlib.rc_context(STYLE):
        heading = f"{picture.title}: {title}" if title else picture.title
        if isinstance(picture, Curve):
            figure = draw_curve(picture, heading, footer)
        elif isinstance(picture, Bars):
            figure = draw_bars(picture, heading, footer)
        else:
            figure = draw_matrix(picture, heading, footer)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # laid out once, for both files
        imsave(folder / f"{picture.slug}.png", np.asarray(canvas.buffer_rgba()))
        figure.set_layout_engine(None)
        figure.savefig(folder / f"{picture.slug}.svg", metadata={"Date": None})


class Sheet:
    """A figure with a heading above, and below the axes a legend, a note and a footer that nothing overlaps."""

    def __init__(
        self, width: float, height: float, heading: str, note: str, footer: str, labels: list[str] | None = None
    ):
        """Sizes in inches, of the axes alone; ``labels`` are those of the legend, for which room is kept."""
        from matplotlib.figure import Figure

        small = 6.5
        lines = [line for text in (note, footer) if text for line in textwrap.wrap(text, int(width * 21))]
        self.text_height = (len(lines) * small * 1.35 + 8) / 72
        labels = list(dict.fromkeys(labels or []))
        self.legend_columns = max(1, min(5, int(width * 11 // (max(map(len, labels), default=1) + 8))))
        legend_height = 0.19 * -(-len(labels) // self.legend_columns) + (0.1 if labels else 0)
        headline = textwrap.fill(heading, int(width * 11))
        above = (headline.count("\n") + 1) * 14 / 72 + 0.08
        below = self.text_height + legend_height
        self.height = height + below + above
        self.figure = Figure(figsize=(width, self.height), layout="constrained")
        engine: Any = self.figure.get_layout_engine()
        engine.set(rect=(0, below / self.height, 1, height / self.height))
        self.figure.text(0.5, 1 - 0.06 / self.height, headline, ha="center", va="top", fontsize=11)
        self.figure.text(
            0.08 / width, 5 / 72 / self.height, "\n".join(lines), fontsize=small, va="bottom", color="#444444"
        )

    def legend(self, entries: dict[str, Any]) -> None:
        self.figure.legend(
            list(entries.values()), list(entries), loc="lower center", ncols=self.legend_columns, frameon=False,
            bbox_to_anchor=(0.5, self.text_height / self.height), borderaxespad=0.2, handlelength=2.6,
            labelspacing=0.35,
        )  # fmt: skip


def draw_curve(curve: Curve, heading: str, footer: str) -> Figure:
    parts = [split_panel(panel) for panel in curve.panels]
    panels = [panel for part in parts for panel in part]
    columns = 3 if len(panels) > 4 or len(panels) == 3 else 2 if len(panels) > 1 else 1
    if len(parts) > 1 and len(parts[0]) == len(parts[-1]) in (2, 3, 4):
        columns = len(parts[0])  # one row per quantity
    rows = -(-len(panels) // columns)
    labels = legend_labels(panels)
    sheet = Sheet({1: 7.0, 2: 10.0, 3: 13.5}.get(columns, 16.0), 3.4 * rows, heading, curve.note, footer, labels)
    axes = sheet.figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in axes[len(panels) :]:
        empty.set_visible(False)
    entries: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        entries |= draw_panel(axis, panel)
    if labels:
        sheet.legend({label: entries[label] for label in labels})
    return sheet.figure


def legend_labels(panels: list[Panel]) -> list[str]:
    """What the legend lists: every line, or eight of the many that are told apart by a gradient; ideals last."""
    labels: list[str] = []
    for panel in panels:
        measured = [line.label for line in panel.lines if not line.ideal]
        if len(measured) > MOST_LABELLED:
            measured = [*measured[:: -(-len(measured) // 8)], gradient_label(len(measured))]
        labels += measured
    labels = list(dict.fromkeys(labels))
    ideals = list(dict.fromkeys(line.label for panel in panels for line in panel.lines if line.ideal))
    return [] if labels == ["all runs"] and not ideals else labels + ideals


def draw_bars(bars: Bars, heading: str, footer: str) -> Figure:
    """Horizontal bars, one row per point, the panels side by side."""
    rows, note = bars.rows[:MOST_ROWS], bars.note
    if len(bars.rows) > MOST_ROWS:
        note = f"The first {MOST_ROWS} of {len(bars.rows)} rows; all of them are in table.csv. {note}"
    names = ["\n".join(textwrap.wrap(row, 42)) for row in rows]
    width = 7.5 if len(bars.panels) == 1 else 3.0 + 2.9 * len(bars.panels)
    parts = list(dict.fromkeys(part for panel in bars.panels for part in panel.parts))
    labels = parts if max(len(panel.parts) for panel in bars.panels) > 1 or bars.named else []
    height = 0.9 + 0.3 * len(rows) + 0.1 * sum(name.count("\n") for name in names)
    sheet = Sheet(width, height, heading, note, footer, labels)
    axes = sheet.figure.subplots(1, len(bars.panels), squeeze=False, sharey=True)[0]
    entries: dict[str, Any] = {}
    places = list(range(len(rows)))
    for axis, panel in zip(axes, bars.panels, strict=True):
        entries |= draw_bar_panel(axis, panel, bars.missing)
    axes[0].set_yticks(places, names)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    if labels:
        sheet.legend(entries)
    return sheet.figure


def draw_bar_panel(axis: Axes, panel: BarPanel, missing: dict[int, str]) -> dict[str, Any]:
    """Draw the stacked bars of one panel; returns the handles of its parts by name."""
    parts = {name: values[:MOST_ROWS] for name, values in panel.parts.items()}
    reach = panel.reach[:MOST_ROWS]
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    places = list(range(len(totals)))
    scale, x_label = unit_of(panel.quantity, panel.x_label, [*totals, *reach])
    left = [0.0] * len(totals)
    entries: dict[str, Any] = {}
    for number, (name, values) in enumerate(parts.items()):
        widths = [value * scale for value in values]
        entries[name] = axis.barh(
            places, widths, 0.7, left=left, color=COLORS[number % len(COLORS)], alpha=0.85, edgecolor="white",
            hatch=HATCHES[number % len(HATCHES)],
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if reach:
        ends = [max(0.0, end * scale - start) for end, start in zip(reach, left, strict=True)]
        axis.errorbar(left, places, xerr=[[0.0] * len(ends), ends], fmt="none", ecolor="black", elinewidth=1, capsize=3)
        left = [start + end for start, end in zip(left, ends, strict=True)]
    for place, (end, total) in enumerate(zip(left, totals, strict=True)):
        text = missing.get(place) or f"{total * scale:.3g}"
        axis.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    if panel.ideal is not None:
        axis.axvline(panel.ideal * scale, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axis.set_xlim(0, max([*left, 0]) * 1.18 or 1)
    axis.set_title(panel.title)
    axis.set_xlabel(x_label)
    axis.grid(False, axis="y")
    return entries


def draw_matrix(matrix: Matrix, heading: str, footer: str) -> Figure:
    """A row per series and a column per size; a cell is divided among the statuses of its runs."""
    from matplotlib.patches import Rectangle

    rows, cells, note = fold(matrix)
    names = ["\n".join(textwrap.wrap(row, 42)) for row in rows]
    height = 0.7 + 0.36 * len(rows) + 0.1 * sum(name.count("\n") for name in names)
    sheet = Sheet(max(7.0, 3.2 + 1.15 * len(matrix.columns)), height, heading, note, footer)
    axis = sheet.figure.subplots()
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            total, start = sum(cell.values()), x - 0.5
            order = sorted(cell, key=list(STATUS_COLORS).index)
            for status in order:
                share = cell[status] / total
                axis.add_patch(Rectangle((start, y - 0.5), share, 1, facecolor=STATUS_COLORS[status], linewidth=0))
                start += share
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=2))
            many = len(order) > 1
            text = "\n".join(counted(status, cell[status], always=many) for status in order)
            style: dict[str, Any] = {"color": "white" if order == ["failed"] else "black"}
            if many:
                style["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
            axis.text(x, y, text, ha="center", va="center", fontsize=7.5 if len(order) < 3 else 5.5, **style)
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
    return sheet.figure


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
