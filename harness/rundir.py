"""The run directory: what a run was, how it ended and what it measured. A run's status is what stands here.

``<runs_dir>/<study>/<name>-<hash8>/`` holds config.yaml, ds_config.json (engine.json where DDP or FSDP trains),
command.txt, env.json, status.json, metrics.jsonl, summary.json, logs/ and wandb/. Every file appears whole;
metrics.jsonl grows by whole rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from harness.config import Config, ConfigError, check_study, dump
from harness.environment import alive, process_of

Status = Literal["running", "completed", "oom", "diverged", "failed", "timeout", "killed"]

# What does not change the result, or only how it is kept and shown.
NOT_HASHED = (
    ("study",), ("runs_dir",), ("wandb",), ("plan",), ("objective",), ("train", "log_every"), ("train", "resume"),
    ("train", "keep"), ("data", "cache_dir"), ("launch", "timeout_s"),
    ("launch", "rerun"),
)  # fmt: skip
# What every status record has, and what it may have.
NEEDED_IN_STATUS: dict[str, Any] = {"status": str, "pid": int, "pid_started": (int, float), "host": str}
STATUS_TYPES = NEEDED_IN_STATUS | {"reason": str, "attempt": int, "wandb_attempt": int}
GONE = {"status": "failed", "reason": "its run directory is gone"}
VANISHED = "its process vanished without a word"


def config_hash(config: Config) -> str:
    """Eight hex digits that identify a resolved config; equal for runs that must give the same result."""
    values = asdict(config)
    for *groups, key in NOT_HASHED:
        node = values
        for group in groups:
            node = node[group]
        node.pop(key)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def run_name(config: Config) -> str:
    """A readable name from a resolved config: model, engine and stage, world, batch, asynchronous workers, hash."""
    model = (
        re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(config.model.path or config.model.name).name)[:40].strip(".") or "model"
    )
    parts = [model, job_type(config), f"w{config.launch.world_size}", f"b{config.batch.global_size}"]
    if config.parallel.kind == "async":
        parts.append(f"async{config.parallel.workers}")
    return "-".join([*parts, config_hash(config)])


def job_type(config: Config) -> str:
    """``zero3``, ``ddp``, …: the kind of run, W&B's job_type."""
    return f"zero{config.zero.stage}" if config.engine.kind == "deepspeed" else config.engine.kind


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is seen either not at all or complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


class RunGoingOn(ConfigError):
    """The same run is going on in another process."""


class RunDir:
    """One run's directory, written by one process at a time: the parent of the world, then its rank 0."""

    def __init__(self, path: Path):
        self.path = path
        self.logs = path / "logs"

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """Where the run of a resolved config lies, whether it exists or not."""
        return cls(Path(config.runs_dir).expanduser() / config.study / run_name(config))

    @classmethod
    def create(cls, config: Config, command: str) -> RunDir:
        """The directory of a run that starts now. A completed record of the same run moves to ``<name>.N``; one that
        did not complete is begun again in its place.

        Args:
            command: one that runs this config on its own, for the record.

        Raises:
            RunGoingOn: when the same run is going on.
            ConfigError: when the directory cannot be written.
        """
        run = cls.of(config)
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(run.path.parent / f".{run.path.name}.lock"):
                earlier = run.read_status() or {}
                foreign = earlier.get("host") != socket.gethostname()
                if earlier.get("status") == "running" and not (foreign and config.launch.rerun == "all"):
                    where = f"pid {earlier.get('pid')} on {earlier.get('host')}"
                    remedy = "wait for it or end it, or use launch.rerun=all if that host is gone"
                    raise RunGoingOn(f"{run.path}: this run is going on ({where}); {remedy}")
                if earlier.get("status") == "completed":
                    beside = free_neighbour(run.path)
                    run.path.rename(beside)
                    print(f"{run.path} has completed before: its record is now {beside.name}", file=sys.stderr)
                run._begin(
                    dump(config),
                    command,
                    int(earlier.get("attempt", 0)) + 1,
                    resumable=config.train.resume != "never",
                )
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"runs_dir={config.runs_dir}: cannot be written ({why})") from error
        return run

    @classmethod
    def refuse(cls, composed: DictConfig, command: str, reason: str) -> RunDir:
        """The failed record of a composed config that cannot run."""
        text = OmegaConf.to_yaml(composed)
        run = cls(cls._refusal_path(composed))
        run._begin(text, command, 1)
        run.write_status("failed", reason)
        return run

    @classmethod
    def forget_refusal(cls, composed: DictConfig) -> None:
        """What could not run before can now."""
        shutil.rmtree(cls._refusal_path(composed), ignore_errors=True)

    @staticmethod
    def _refusal_path(composed: DictConfig) -> Path:
        digest = hashlib.sha256(OmegaConf.to_yaml(composed).encode()).hexdigest()[:8]
        return Path(composed.runs_dir).expanduser() / check_study(composed.study) / f"refused-{digest}"

    def _begin(self, config_text: str, command: str, attempt: int, resumable: bool = False) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        if not resumable:
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        goes_on = any(self.path.glob("checkpoints/samples-*"))
        if not goes_on:
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
        for name in ("summary.json", "ds_config.json", "engine.json", "env.json"):
            (self.path / name).unlink(missing_ok=True)
        for log in self.logs.glob("*.log"):
            log.unlink()
        write_whole(self.path / "config.yaml", config_text)
        write_whole(self.path / "command.txt", command + "\n")
        wandb_attempt = (self.read_status() or {}).get("wandb_attempt", 1) if goes_on else attempt
        (self.path / "status.json").unlink(missing_ok=True)  # nothing of an earlier attempt's record stays
        self.write_status(
            "running", started_at=time.time(), attempt=attempt, wandb_attempt=wandb_attempt, resumable=False
        )

    def write_status(self, status: Status, reason: str = "", **more: Any) -> None:
        """Record how the run stands; ``more`` is kept from one call to the next."""
        record = self._read("status.json") or {}
        own = psutil.Process()
        record |= {"status": status, "reason": " ".join(reason.split()), "host": socket.gethostname()}
        record |= {"pid": own.pid, "pid_started": own.create_time(), "updated_at": time.time(), **more}
        write_json(self.path / "status.json", record)

    def read_status(self) -> dict[str, Any] | None:
        """The status record, or None; a `running` whose process is gone on this host reads as `killed`."""
        record = self._read("status.json")
        if record is None:
            return None
        if not is_status(record):
            return {"status": "failed", "reason": "its status.json is damaged", "host": socket.gethostname()}
        here = record["host"] == socket.gethostname()
        if here and record["status"] == "running" and not alive(process_of(record["pid"], record["pid_started"])):
            record |= {"status": "killed", "reason": VANISHED}
        return record

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to metrics.jsonl in one write; non-finite numbers become null."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(to_lines(rows))

    def cut_metrics(self, step: int) -> None:
        """Keep the rows up to update ``step``, from which a run goes on."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        write_whole(self.path / "metrics.jsonl", to_lines(rows))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; what is none, like a row that a full disk has cut off, is left out."""
        path = self.path / "metrics.jsonl"
        rows = []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
        return rows

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.path / "summary.json", {key: finite(value) for key, value in summary.items()})

    def read_summary(self) -> dict[str, Any] | None:
        return self._read("summary.json")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            value = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def is_status(record: dict[str, Any]) -> bool:
    """Whether this is a whole status record."""
    typed = all(isinstance(record[key], kind) for key, kind in STATUS_TYPES.items() if key in record)
    return NEEDED_IN_STATUS.keys() <= record.keys() and typed and record["status"] in get_args(Status)


def to_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps({k: finite(v) for k, v in row.items()}, allow_nan=False) + "\n" for row in rows)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and value - value != 0 else value


def free_neighbour(path: Path) -> Path:
    """The first of ``path.1``, ``path.2``, … that does not exist."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
