"""What every picture of a report shows, as numbers. Nothing is drawn here, so that the numbers can be tested.

A curve without data is left out, with its reason. Points that did not complete are part of a curve: its marks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from harness.report.scaling import Spread
from harness.report.series import Point, label_of, natural, part_of

RANKS_LABEL = "ranks (world size)"


@dataclass
class Mark:
    """A point that did not complete: where it would stand, how it ended and how many runs did."""

    x: float
    status: str
    count: int = 1
    y: float | None = None  # the last value there was; None: at the edge


@dataclass
class Line:
    """One series on a panel: medians over seeds, with the smallest and largest value where there are several."""

    label: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    color: int = 0  # lines of the same series have the same colour in every picture
    dash: int = 0
    ideal: bool = False
    values: dict[str, Any] = field(default_factory=dict)  # of the series, by varied key
    suffix: str = ""  # of the label, behind what the values say

    def add(self, x: float, value: Spread) -> None:
        self.x.append(x)
        self.y.append(value.median)
        self.low.append(value.low)
        self.high.append(value.high)


@dataclass
class Panel:
    """Lines that share axes. Units are part of the labels; ``quantity`` chooses how large numbers are shown."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    quantity: str = "number"  # `number`, `bytes`, `seconds` or `percent`
    steps: bool = False  # x counts doublings: ranks, batch sizes
    band: bool = False  # the spread as a band instead of bars
    zero: bool = True  # y starts at 0


@dataclass
class Curve:
    """One picture of lines."""

    slug: str
    title: str
    panels: list[Panel]
    note: str = ""


@dataclass
class Bars:
    """One picture of horizontal bars: per row and panel the parts that are stacked."""

    slug: str
    title: str
    rows: list[str]
    panels: list[BarPanel]
    note: str = ""


@dataclass
class BarPanel:
    title: str
    x_label: str
    parts: dict[str, list[float]]  # one value per row
    quantity: str = "bytes"
    reach: list[float] = field(default_factory=list)  # per row, the end of a whisker from the bar's end
    ideal: float | None = None


@dataclass
class Matrix:
    """How every point ended: rows of series, columns of world or batch sizes, counts of each status."""

    slug: str
    title: str
    x_label: str
    columns: list[str]
    rows: list[str]
    cells: list[list[dict[str, int]]]
    note: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A picture that was not made, and why."""

    slug: str
    title: str
    why: str


Picture = Curve | Bars | Matrix


def marks_of(points: dict[int, Point]) -> list[Mark]:
    """What did not complete, and is not still running, at its place on the x-axis."""
    return [
        Mark(x, status, count)
        for x, point in points.items()
        for status, count in sorted(point.statuses.items())
        if status not in ("completed", "running")
    ]


MOST_LINES = 8  # told apart on one panel
MOST_PANELS = 6


def split_panel(panel: Panel) -> list[Panel]:
    """A panel with many lines as several, one per value of the varied key that divides the lines best.

    What a panel's title says is no longer part of its labels, and lines that agree in the rest share a colour.
    """
    lines = [line for line in panel.lines if not line.ideal]
    if len(lines) <= MOST_LINES:
        return [panel]
    keys = list(dict.fromkeys(key for line in lines for key in line.values))
    values = {key: {line.values.get(key) for line in lines} for key in keys}
    sizes = {
        key: max(sum(line.values.get(key) == value for line in lines) for value in found)
        for key, found in values.items()
        if 2 <= len(found) <= MOST_PANELS
    }
    if not sizes:
        return [panel]
    fitting = [key for key in sizes if sizes[key] <= MOST_LINES]
    key = min(fitting, key=lambda key: len(values[key])) if fitting else min(sizes, key=lambda key: sizes[key])
    colors: dict[str, int] = {}
    panels = []
    for value in sorted(values[key], key=natural):
        part = [
            without(line, key, colors)
            for line in panel.lines
            if line.values.get(key, value if line.ideal else None) == value
        ]
        title = ": ".join(text for text in (panel.title.split(":")[0], part_of(key, value)) if text)
        panels.append(replace(panel, title=title, lines=part))
    return panels


def without(line: Line, key: str, colors: dict[str, int]) -> Line:
    """The line without what the title of its panel says; its colour is that of the rest."""
    if line.ideal:
        return line
    rest = {name: value for name, value in line.values.items() if name != key}
    name = label_of(rest)
    return replace(line, label=name + line.suffix, color=colors.setdefault(name, len(colors)), values=rest)
