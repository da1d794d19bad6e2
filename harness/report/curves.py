"""What every picture of a report shows, as numbers. Nothing is drawn here, so that the numbers can be tested.

A curve without data is left out, with its reason. Points that did not complete are part of a curve: its marks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from harness.report.scaling import Spread
from harness.report.series import Point, label_of, natural

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
    points: bool = False  # x and y are the same quantity: points instead of lines, both axes logarithmic


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
    missing: dict[int, str] = field(default_factory=dict)  # how the points ended that have no bar, by row
    named: bool = False  # the parts are named even if there is one


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


MOST_LINES = 9  # told apart on one panel
MOST_PANELS = 6


def split_panel(panel: Panel) -> list[Panel]:
    """A panel with many lines as several, divided by one or two of the varied keys, by words rather than by sizes.

    What a panel's title says is no longer part of its labels, and lines that agree in the rest share a colour.
    """
    lines = [line for line in panel.lines if not line.ideal]
    keys = list(dict.fromkeys(key for line in lines for key in line.values))
    if len(lines) <= MOST_LINES or not keys:
        return [panel]
    choices = [(key,) for key in keys] + list(itertools.combinations(keys, 2))
    counts = {choice: Counter(part_values(line, choice) for line in lines) for choice in choices}
    counts = {choice: count for choice, count in counts.items() if 2 <= len(count) <= MOST_PANELS}
    if not counts:
        return [panel]
    keys_of = min(counts, key=lambda choice: cost(choice, counts[choice]))
    colors: dict[str, int] = {}
    panels = []
    for values in sorted(counts[keys_of], key=lambda values: [natural(value) for value in values]):
        part = [without(line, keys_of, colors, panel.steps) for line in panel.lines if belongs(line, keys_of, values)]
        text = label_of(dict(zip(keys_of, values, strict=True)))
        panels.append(
            replace(panel, title=": ".join(each for each in (panel.title.split(":")[0], text) if each), lines=part)
        )
    return panels


def part_values(line: Line, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(line.values.get(key) for key in keys)


def belongs(line: Line, keys: tuple[str, ...], values: tuple[Any, ...]) -> bool:
    """Whether a line has these values; an ideal belongs everywhere that it does not contradict."""
    return all(
        line.values.get(key, value if line.ideal else None) == value for key, value in zip(keys, values, strict=True)
    )


def cost(keys: tuple[str, ...], count: Counter[tuple[Any, ...]]) -> tuple[int, ...]:
    """Smaller is better: lines too many for a panel, keys whose values have an order, panels."""
    sizes = sum(any(isinstance(values[i], int | float) for values in count) for i in range(len(keys)))
    return (max(0, max(count.values()) - MOST_LINES), sizes, len(count))


def without(line: Line, keys: tuple[str, ...], colors: dict[str, int], steps: bool) -> Line:
    """The line without what the title of its panel says; its colour is that of the rest."""
    if line.ideal:
        return line
    rest = {key: value for key, value in line.values.items() if key not in keys}
    label = label_of(rest)
    color = colors.setdefault(label, len(colors))
    return replace(line, label=label + line.suffix, color=color, dash=line.dash if steps else color, values=rest)
