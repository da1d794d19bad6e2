"""One run as the report sees it, and the checks that a record must pass, wherever it was read from."""

from __future__ import annotations

import json
import sys
from array import array
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from harness.config import GROUPS, Config
from harness.ds_config import leaves
from harness.rundir import Status

STATUSES: tuple[str, ...] = get_args(Status)
COLUMNS = ("samples", "loss", "eval_loss", "wall_s", "sim_time_s", "updates")  # of metrics.jsonl, kept for the curves
NEEDED = ("world_size", "global_batch_size", "tokens_per_s", "final_loss")  # of a completed run's summary.json
NUMBERS = (
    "world_size", "zero_stage", "global_batch_size", "micro_batch_size", "grad_accum_steps", "lr", "n_params",
    "tokens_per_s", "tokens_per_s_per_rank", "samples_per_s", "step_time_s_median", "step_time_s_p90", "mfu", "hfu",
    "tflops_per_rank", "peak_memory_bytes", "param_bytes", "grad_bytes", "optimizer_bytes", "comm_traffic_bytes",
    "final_loss", "eval_loss", "skipped_steps", "staleness_mean", "pending_gradient_bytes", "updates",
    "sim_time_s", "critical_batch_size",
)  # fmt: skip


class DamagedRun(ValueError):
    """Why a run cannot be used, in one line."""


@dataclass(frozen=True)
class Environment:
    """Where a run was measured; empty where it is not known."""

    hardware: str = ""  # the GPUs, or the CPU and its cores
    versions: tuple[tuple[str, str], ...] = ()
    git_commit: str = ""
    corpus: str = ""  # fingerprint of the tokenised data


@dataclass
class Run:
    """One run: what it was, how it ended, what it measured."""

    name: str
    study: str
    status: str
    reason: str
    config: dict[str, Any]  # resolved, dotted keys; lists are tuples
    summary: dict[str, Any]
    metrics: dict[str, array[float]]  # columns of equal length, NaN where null
    environment: Environment = field(default_factory=Environment)

    @property
    def world_size(self) -> int | None:
        return self.config["launch.world_size"]

    @property
    def global_batch_size(self) -> int | None:
        return self.config["batch.global_size"]

    @property
    def resolved(self) -> bool:
        """Whether every value was decided; a run that was refused before is not."""
        sizes = (self.config[f"batch.{key}"] for key in ("global_size", "per_rank_size", "micro_size"))
        return None not in (self.world_size, *sizes)

    def number(self, key: str) -> float | None:
        """A number of summary.json, None where it does not apply."""
        return self.summary.get(key)


def to_columns(rows: list[Any]) -> dict[str, array[float]]:
    """Columns from rows of metrics, NaN where a row has null or nothing.

    Raises:
        DamagedRun: for a row without samples and loss, or with anything but numbers.
    """
    columns = {key: array("d") for key in COLUMNS}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or "loss" not in row or row.get("samples") is None:
            raise DamagedRun(f"row {number} of metrics.jsonl has no samples or no loss: written by another version")
        for key in COLUMNS:
            value = row.get(key)
            if value is None:
                value = float("nan")
            elif not is_number(value):
                raise DamagedRun(f"row {number} of metrics.jsonl: {key}={value!r} is no number")
            columns[key].append(value)
    return columns


def check_run(run: Run) -> None:
    """Refuse a record whose parts contradict each other.

    Raises:
        DamagedRun: naming what is wrong.
    """
    summary = run.summary
    for key in ("launch.world_size", "batch.global_size", "batch.per_rank_size", "batch.micro_size"):
        value = run.config[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DamagedRun(f"config: {key}={value!r} is no positive whole number")
    for key, value in summary.items():
        if key in NUMBERS and value is not None and not is_number(value):
            raise DamagedRun(f"summary: {key}={value!r} is no number")
    for key in ("comm_bytes_per_step", "predicted", "staleness_histogram"):
        if not isinstance(summary.get(key) or {}, dict):
            raise DamagedRun(f"summary: {key} holds no object")
    histogram = summary.get("staleness_histogram") or {}
    if not all(str(staleness).isdecimal() and is_number(count) for staleness, count in histogram.items()):
        raise DamagedRun("summary: staleness_histogram holds something that is no count")
    operations = summary.get("comm_bytes_per_step") or {}
    if not all(is_number(value) for value in operations.values()):
        raise DamagedRun("summary: comm_bytes_per_step holds something that is no number")
    if run.status != "completed":
        return
    missing = [key for key in NEEDED if key not in summary]
    if missing:
        raise DamagedRun(f"summary lacks {', '.join(missing)}: written by another version")
    if not run.resolved:
        raise DamagedRun("completed, but its config is not resolved")
    expected = {"world_size": run.world_size, "global_batch_size": run.global_batch_size}
    for key, value in expected.items():
        if summary[key] != value:
            raise DamagedRun(f"summary: {key}={summary[key]}, but the config says {value}")


def check_keys(values: dict[str, Any], strict: bool) -> None:
    """Refuse a config with other keys than this version's; unless ``strict``, more of them are fine.

    Raises:
        DamagedRun: naming the first few.
    """
    missing: list[str] = []
    unknown: list[str] = []
    for group, keys in [("", expected_keys("", None)), *((name, None) for name in sections())]:
        node = values if group == "" else values.get(group)
        if group and not isinstance(node, dict):
            raise DamagedRun(f"config: {group} holds no section: written by another version or program")
        assert isinstance(node, dict)
        keys = keys or expected_keys(group, node.get("kind"))
        prefix = f"{group}." if group else ""
        missing += [prefix + key for key in sorted(keys - node.keys())]
        unknown += [prefix + str(key) for key in sorted(node.keys() - keys, key=str)]
        if missing:
            raise DamagedRun(f"config lacks {', '.join(missing[:3])}: written by another version or program")
    if unknown and strict:
        raise DamagedRun(f"config has unknown keys {', '.join(unknown[:3])}: written by another version or program")


@cache
def sections() -> dict[str, type]:
    """The groups of a config that are dataclasses."""
    return {
        name: hint for name, hint in get_type_hints(Config).items() if is_dataclass(hint) and isinstance(hint, type)
    }


@cache
def expected_keys(group: str, kind: str | None) -> frozenset[str]:
    schema: type
    if group == "":
        schema = Config
    elif group in GROUPS:
        schemas: Any = GROUPS[group]
        schema = schemas.get(str(kind)) or next(iter(schemas.values()))
    else:
        schema = sections()[group]
    return frozenset(each.name for each in fields(schema))


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys; lists become tuples, so that every value can be compared and hashed; empty sections are left out."""
    return {path: freeze(value) for path, value in leaves(values) if value != {}}


def freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(freeze(each) for each in value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def to_environment(values: dict[str, Any]) -> Environment:
    """The environment from env.json, whatever of it is there."""
    hardware = values.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    versions = values.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    gpus = hardware.get("gpus")
    names = [str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    if names:
        machine = ", ".join(sorted(set(names)))
    else:
        cores = hardware.get("cores")
        machine = ", ".join(str(part) for part in (hardware.get("cpu"), cores and f"{cores} cores") if part)
    return Environment(
        hardware=machine,
        versions=tuple(sorted((str(name), str(version)) for name, version in versions.items() if version)),
        git_commit=str(values.get("git_commit") or ""),
        corpus=str(values.get("corpus_fingerprint") or ""),
    )


def is_number(value: Any) -> bool:
    """Whether this is a number that a float can hold."""
    largest = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest
