"""Runs as typed records, read from run directories. What cannot be trusted is skipped and named, never guessed."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import ConfigError, one_line
from harness.report.record import (
    STATUSES,
    DamagedRun,
    Run,
    check_keys,
    check_run,
    flatten,
    to_columns,
    to_environment,
)
from harness.rundir import RunDir

RUN_FILES = ("config.yaml", "status.json", "summary.json", "metrics.jsonl")
UNREADABLE = (OSError, ValueError, RecursionError)  # what reading a file of whatever content can raise
EARLIER_RECORD = re.compile(r"-[0-9a-f]{8}\.\d+$")


@dataclass(frozen=True)
class Skipped:
    """A folder or a part of a run that was left out, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def read_runs(paths: list[Path]) -> tuple[list[Run], list[Skipped]]:
    """Every run of the given studies or run directories, and what was left out.

    Raises:
        ConfigError: for a path that is no folder.
    """
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for path in run_folders(paths):
        try:
            run, remark = read_run(path)
        except DamagedRun as error:
            skipped.append(Skipped(str(path), f"skipped, {error}"))
            continue
        runs.append(run)
        if remark:
            skipped.append(Skipped(str(path), remark))
    return runs, skipped


def run_folders(paths: list[Path]) -> list[Path]:
    """The folders that may be runs, each once; hidden ones, reports and earlier records of a run are not."""
    folders: dict[Path, Path] = {}
    for path in paths:
        try:
            found = [path] if is_run(path) else sorted(p for p in path.iterdir() if p.is_dir())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); give runs/STUDY") from error
        for folder in found:
            inside = folder is not path
            if inside and (
                folder.name.startswith(".") or folder.name == "report" or EARLIER_RECORD.search(folder.name)
            ):
                continue
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def read_run(path: Path) -> tuple[Run, str]:
    """One run directory as a record, and a remark about what had to be left out of it, mostly empty.

    Raises:
        DamagedRun: when any of its files is missing, unreadable or contradicts another.
    """
    if not is_run(path):
        raise DamagedRun("empty" if not any(path.iterdir()) else "not a run: no config.yaml, no status.json")
    values = read_config(path / "config.yaml")
    check_keys(values, strict=True)
    status = read_status(path)
    summary = read_json(path / "summary.json")
    metrics, remark = read_metrics(path / "metrics.jsonl")
    environment = to_environment(read_json(path / "env.json") or {})
    study = str(values.get("study") or path.resolve().parent.name)
    reason = str(status.get("reason") or "")
    run = Run(path.name, study, status["status"], reason, flatten(values), summary or {}, metrics, environment)
    if summary is None and run.status == "completed":
        raise DamagedRun("completed, but without summary.json")
    check_run(run)
    return run, remark


def read_config(path: Path) -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        values = yaml.load(path.read_text(), Loader=loader)
    except FileNotFoundError:
        raise DamagedRun("no config.yaml") from None
    except (*UNREADABLE, yaml.YAMLError) as error:
        raise DamagedRun(f"config.yaml cannot be read ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise DamagedRun("config.yaml holds no config")
    return values


def read_status(path: Path) -> dict[str, Any]:
    """status.json as it was written, or as :meth:`RunDir.read_status` reads a `running` whose process is gone."""
    try:
        written = json.loads((path / "status.json").read_text())
    except FileNotFoundError as error:
        raise DamagedRun("no status.json") from error
    except UNREADABLE as error:
        raise DamagedRun(f"status.json cannot be read ({one_line(error)})") from error
    if not isinstance(written, dict) or written.get("status") not in STATUSES:
        raise DamagedRun(f"status.json holds no known status (one of {', '.join(STATUSES)})")
    return RunDir(path).read_status() or written


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None without the file."""
    try:
        value = json.loads(path.read_text(), parse_constant=no_number)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise DamagedRun(f"{path.name} cannot be read ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise DamagedRun(f"{path.name} holds no object")
    return value


def read_metrics(path: Path) -> tuple[dict[str, array[float]], str]:
    """The columns of metrics.jsonl, and a remark when its last row was cut off in the middle."""
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return to_columns([]), ""
    except UNREADABLE as error:
        raise DamagedRun(f"metrics.jsonl cannot be read ({one_line(error)})") from error
    remark = ""
    try:
        json.loads(lines[-1] or "0")
    except (ValueError, RecursionError):
        lines.pop()
        remark = "the last row of metrics.jsonl is half-written and left out"
    try:
        rows = json.loads(f"[{','.join(line for line in lines if line.strip())}]", parse_constant=no_number)
    except UNREADABLE as error:
        raise DamagedRun(f"metrics.jsonl has a damaged row ({one_line(error)})") from error
    return to_columns(rows), remark


def no_number(name: str) -> None:
    """NaN and the infinities, which JSON does not have, read as null."""
