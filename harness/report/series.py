"""Finds the series of a study by itself: whatever varies in the configs, less what follows from something else.

``seed`` makes median and spread, the world size is the x-axis of scaling curves, and neither makes a series. A key
that is derived (the batch per rank in strong scaling, the optimizer's own keys when the optimizer varies) is no
difference of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.report.record import Run
from harness.report.scaling import Spread, spread
from harness.rundir import NOT_HASHED

RANKS = "launch.world_size"
GLOBAL = "batch.global_size"  # chosen in strong scaling, derived in weak scaling
PER_RANK = "batch.per_rank_size"  # the other way round
MICRO = "batch.micro_size"
NO_ACCUMULATION = "no accumulation"

# Never a difference between runs: what is not hashed, what makes the spread, other commands' keys, places on a machine.
OTHER_KEYS = ("seed", "plan", "hydra", "launch.rerun", "train.resume", "data.cache_dir")
IGNORED = re.compile(
    "|".join(f"{re.escape(key)}($|\\.)" for key in (*(".".join(keys) for keys in NOT_HASHED), *OTHER_KEYS))
)

# A key that starts with the first is no difference of its own when it is a function of those of the second.
FOLLOWS = (
    ("model.", ("model",)),
    ("data.", ("data",)),
    ("optimizer.", ("optimizer.kind",)),
    ("lr.base", ("optimizer.kind",)),
    ("zero.", ("sharding", "model")),
    ("engine.", ("sharding",)),
    ("checkpointing.", ("checkpointing.mode",)),
    ("parallel.clock_cv", ("parallel.clock",)),
    ("parallel.", ("parallel.kind",)),
    ("batch.", ("batch.kind",)),
    ("deepspeed.", ("sharding",)),
)

# The order of a label's parts; other keys follow in alphabetical order, the world size comes last.
ORDER = (
    "model", "data", "sharding", "precision", "checkpointing.mode", "optimizer.kind", "lr.rule", "lr.base",
    "parallel.kind", "parallel.workers", "parallel.clock", "parallel.remedy", "batch.kind", GLOBAL, PER_RANK, MICRO,
)  # fmt: skip

NAMES = {"adamw": "AdamW", "sgd": "SGD", "ddp": "DDP", "fsdp": "FSDP"}


@dataclass
class Point:
    """Runs that are equal but for their seed."""

    runs: list[Run] = field(default_factory=list)

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.status == "completed"]

    @property
    def statuses(self) -> Counter[str]:
        return Counter(run.status for run in self.runs)

    def spread(self, number: Callable[[Run], float | None] | str) -> Spread | None:
        """Median and range over the completed runs of a number of summary.json, or of any function of a run."""
        get = number if callable(number) else lambda run: run.number(number)
        return spread(get(run) for run in self.completed)

    def median(self, number: Callable[[Run], float | None] | str) -> float | None:
        found = self.spread(number)
        return found.median if found else None


@dataclass
class Series:
    """Runs that belong on one line."""

    label: str
    values: dict[str, Any]  # of the keys that tell the series of a study apart
    kind: str  # `strong`, `weak`, or empty where both are on one line
    runs: list[Run]

    def points(self, x: Callable[[Run], int | None]) -> dict[int, Point]:
        """Points in ascending order of x; runs without an x are left out."""
        points: dict[int, Point] = defaultdict(Point)
        for run in self.runs:
            place = x(run)
            if place is not None:
                points[place].runs.append(run)
        return dict(sorted(points.items()))

    def by_ranks(self) -> dict[int, Point]:
        return self.points(lambda run: run.world_size)

    def by_batch(self) -> dict[int, Point]:
        return self.points(lambda run: run.global_batch_size)


class Comparison:
    """Runs side by side: which keys vary, and the series they make.

    Attributes:
        runs: the runs, in the order given.
        settings: per run, what may tell it apart; the keys of one run's setting that are not known are missing.
        varied: the keys that make series, in the order of a label's parts; includes the world size if it varies.
    """

    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.settings = compare(runs)
        self.varied = varied_keys(runs, self.settings)

    def constant(self) -> dict[str, Any]:
        """What is the same in all runs; a run that was refused counts only if there are no others."""
        pairs = list(zip(self.runs, self.settings, strict=True))
        settings = [setting for run, setting in pairs if run.resolved] or self.settings
        first = settings[0]
        return {key: first[key] for key in sorted(first) if all(key in s and s[key] == first[key] for s in settings)}

    def series(self, without: Callable[[Run], Iterable[str]] = lambda run: (RANKS,)) -> list[Series]:
        """Series told apart by every varied key but those in ``without``; the default is for an x-axis of ranks."""
        groups: dict[tuple[tuple[str, Hashable], ...], list[Run]] = defaultdict(list)
        for run, setting in zip(self.runs, self.settings, strict=True):
            left_out = set(without(run))
            key = tuple((key, setting[key]) for key in self.varied if key not in left_out and key in setting)
            kind = "" if "batch.kind" in left_out else run.config["batch.kind"]
            groups[(*key, ("kind", kind))].append(run)
        found = []
        for pairs in sorted(groups, key=lambda pairs: [(self.rank_of(key), natural(value)) for key, value in pairs]):
            values = dict(pairs)
            kind = str(values.pop("kind"))
            found.append(Series(label_of(values), values, kind, groups[pairs]))
        repeated = Counter(series.label for series in found)
        for series in found:
            if repeated[series.label] > 1:
                series.label = ", ".join(f"{key}={value}" for key, value in series.values.items()) or series.kind
        return found

    def by_ranks(self) -> list[Series]:
        return self.series()

    def by_run(self) -> list[Series]:
        """Every point a series of its own: runs equal but for the seed."""
        return self.series(lambda run: ())

    def by_batch(self) -> list[Series]:
        """Series for an x-axis of global batch size; in weak scaling it grows with the ranks."""
        return self.series(lambda run: (PER_RANK, RANKS) if run.config["batch.kind"] == "weak" else (GLOBAL,))

    def rank_of(self, key: str) -> int:
        return self.varied.index(key) if key in self.varied else len(self.varied)


def compare(runs: list[Run]) -> list[dict[str, Any]]:
    """Per run the keys that may tell it apart, derived ones put into the terms in which they were chosen."""
    settings = []
    for run in runs:
        flat = {key: value for key, value in run.config.items() if not IGNORED.match(key)}
        if not run.resolved:  # null and `auto` are not decided yet: no difference to runs in which they are
            flat = {key: value for key, value in flat.items() if value is not None and value != "auto"}
        flat["model"] = flat.pop("model.path", None) or flat.pop("model.name", None)
        flat.pop("model.name", None)
        flat["data"] = flat.get("data.name") or flat.get("data.path") or flat["data.kind"]
        if isinstance(flat["data"], tuple):
            flat["data"] = ", ".join(flat["data"])
        engine = flat.pop("engine.kind")
        if engine == "deepspeed":
            flat["sharding"] = f"ZeRO-{flat.pop('zero.stage')}"
        else:
            flat = {key: value for key, value in flat.items() if not key.startswith(("zero.", "deepspeed."))}
            flat["sharding"] = NAMES.get(engine, engine)
            if engine == "ddp" and flat.get("precision") == "bf16":
                flat["sharding"] += " autocast"  # its weights stay fp32, unlike those of ZeRO in bf16
        flat.pop(PER_RANK if flat["batch.kind"] == "strong" else GLOBAL, None)
        for key, value in (("hardware", run.environment.hardware), ("corpus", run.environment.corpus)):
            if value:
                flat[key] = value
        settings.append(flat)
    drop_derived_micro_sizes(runs, settings)
    drop_derived_workers(runs, settings)
    drop_derived_corpora(runs, settings)
    return settings


def drop_derived_micro_sizes(runs: list[Run], settings: list[dict[str, Any]]) -> None:
    """A micro batch that follows from the batch of a rank, because accumulation is the same, is no difference."""
    steps = {run.config[PER_RANK] // run.config[MICRO] for run in runs if run.resolved}
    if len(steps) <= 1:
        for setting in settings:
            setting.pop(MICRO, None)
        return
    chosen = {run.config[MICRO] for run in runs if run.resolved and run.config[MICRO] < run.config[PER_RANK]}
    for setting in settings:
        if MICRO in setting and setting[MICRO] not in chosen:
            setting[MICRO] = NO_ACCUMULATION


def drop_derived_workers(runs: list[Run], settings: list[dict[str, Any]]) -> None:
    """Workers that are the ranks, as they are by default, are no difference."""
    key = "parallel.workers"
    if all(run.config.get(key) in (None, run.world_size) for run in runs):
        for setting in settings:
            setting.pop(key, None)


def drop_derived_corpora(runs: list[Run], settings: list[dict[str, Any]]) -> None:
    """A corpus that follows from the data's own keys, the tokenizer's model or the seed is no difference."""
    corpora: dict[Hashable, set[str]] = defaultdict(set)
    for run, setting in zip(runs, settings, strict=True):
        if "corpus" in setting:
            source = tuple((key, value) for key, value in setting.items() if key.startswith(("data", "model")))
            corpora[(source, run.config.get("seed"))].add(setting["corpus"])
    if all(len(found) == 1 for found in corpora.values()):
        for setting in settings:
            setting.pop("corpus", None)


def varied_keys(runs: list[Run], settings: list[dict[str, Any]]) -> list[str]:
    """The keys with more than one value that follow from no other key."""
    values: dict[str, set[Hashable]] = defaultdict(set)
    for setting in settings:
        for key, value in setting.items():
            values[key].add(value)
    resolved = [setting for run, setting in zip(runs, settings, strict=True) if run.resolved]
    varied = {key for key, found in values.items() if len(found) > 1}
    # A key that only some have, such as SGD's momentum, differs from those that lack it.
    lacking = {
        key for key in values if any(key not in setting for setting in resolved) and any(key in s for s in resolved)
    }
    varied |= lacking - {"hardware", "corpus"}
    kept = [key for key in varied if not follows(key, varied, settings)]
    return sorted(kept, key=lambda key: (key == RANKS, ORDER.index(key) if key in ORDER else len(ORDER), key))


def follows(key: str, varied: set[str], settings: list[dict[str, Any]]) -> bool:
    """Whether one of the keys that decide over ``key`` varies and explains every value of it."""
    for prefix, deciders in FOLLOWS:
        present = [decider for decider in deciders if decider in varied and decider != key]
        if not key.startswith(prefix) or not present:
            continue
        values: dict[Hashable, set[Hashable]] = defaultdict(set)
        for setting in settings:
            if key in setting:
                values[tuple(setting.get(decider) for decider in present)].add(setting[key])
        return all(len(found) == 1 for found in values.values())
    return False


def label_of(values: dict[str, Any]) -> str:
    """A label for people: ``ZeRO-3, sqrt``. Empty for a study in which nothing varies."""
    return ", ".join(part for part in (part_of(key, value) for key, value in values.items()) if part) or "all runs"


def part_of(key: str, value: Any) -> str:
    name = key.rsplit(".", 1)[-1].replace("_", " ")
    if key == "model":
        return str(value).rstrip("/").rsplit("/", 1)[-1]
    if key in ("data", "sharding", "precision", "optimizer.kind", "hardware", "batch.kind", "parallel.kind"):
        return NAMES.get(str(value), str(value))
    if key == "lr.rule":
        return "no rule" if value == "none" else str(value)
    if key == "checkpointing.mode":
        return "no checkpointing" if value == "none" else f"{value} checkpointing"
    if key == "lr.base":
        return f"lr {number_text(value)}"
    if key == GLOBAL:
        return f"batch {value}"
    if key == PER_RANK:
        return f"{value} per rank"
    if key == MICRO:
        return value if value == NO_ACCUMULATION else f"micro {value}"
    if key == RANKS:
        return f"{value} rank{'' if value == 1 else 's'}"
    if key == "parallel.clock":
        return f"{value} clock"
    if key == "parallel.remedy":
        return "no remedy" if value == "none" else str(value)
    if key == "parallel.workers":
        return f"{value} worker{'' if value == 1 else 's'}"
    if key == "corpus":
        return f"corpus {str(value)[:8]}"
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    return f"{name} {number_text(value)}"


def number_text(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return "[" + ", ".join(number_text(each) for each in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def natural(value: Any) -> tuple[int, float, str]:
    """A sort key over mixed values: numbers by size, then words; what is decided as `none` comes first."""
    if isinstance(value, bool | int | float):
        return (1, float(value), "")
    return (0 if value in (None, "none", NO_ACCUMULATION) else 2, 0.0, str(value))
