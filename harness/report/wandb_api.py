"""Runs as typed records, read from W&B's API instead of from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from harness.config import ConfigError, one_line
from harness.report.record import (
    NEEDED,
    STATUSES,
    DamagedRun,
    Run,
    check_keys,
    check_run,
    flatten,
    to_columns,
    to_environment,
)
from harness.report.runs import Skipped
from harness.report.series import IGNORED

# W&B's own states, for runs whose summary does not say how they ended.
STATES = {"finished": "completed", "running": "running", "crashed": "killed", "killed": "killed", "preempted": "killed"}
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # how W&B writes them


def read_group(project: str, group: str) -> tuple[list[Run], list[Skipped]]:
    """The runs of a group, and what was left out.

    Args:
        project: ``ENTITY/PROJECT``.
        group: the study.

    Raises:
        ConfigError: when W&B refuses or cannot be reached.
    """
    if project.count("/") != 1 or not all(project.split("/")):
        raise ConfigError(f"--wandb {project}: must be ENTITY/PROJECT")
    import wandb

    try:
        found = wandb.Api().runs(project, filters={"group": group}, order="+created_at", lazy=False)
        return to_runs(found)
    except (wandb.Error, ValueError, OSError) as error:
        raise ConfigError(f"--wandb {project}: {one_line(error)}") from error


def to_runs(found: Iterable[Any]) -> tuple[list[Run], list[Skipped]]:
    """Records from ``wandb.apis.public.Run`` objects; of equal configs in a study the newest counts, as on disk."""
    runs: dict[str, Run] = {}
    skipped: list[Skipped] = []
    for each in found:
        if getattr(each, "job_type", None) == "report":
            continue
        try:
            run = to_run(each)
        except DamagedRun as error:
            skipped.append(Skipped(f"{each.name} ({each.id})", f"skipped, {error}"))
            continue
        runs[identity(run)] = run
    return list(runs.values()), skipped


def identity(run: Run) -> str:
    kept = {key: value for key, value in run.config.items() if not IGNORED.match(key)}
    return json.dumps([run.study, run.config["seed"], kept], sort_keys=True)


def to_run(found: Any) -> Run:
    """One record from an object with config, summary_metrics, scan_history, state, name, id and group.

    Raises:
        DamagedRun: when it is no run of this harness, of another version or contradicts itself.
    """
    config = known(dict(found.config))
    check_keys(config, strict=False)
    summary = unflatten(known(dict(found.summary_metrics)))
    status = summary.get("status")
    if status not in STATUSES:
        status = STATES.get(found.state, "failed")
    environment = config.get("env") or summary.get("env") or {}
    run = Run(
        name=found.name or found.id,
        study=found.group or config["study"],
        status=status,
        reason=str(summary.pop("reason", None) or ""),
        config=flatten(config),
        summary={
            key: value for key, value in summary.items() if not key.startswith("_") and key not in ("env", "status")
        },
        metrics=to_columns([{"loss": None, **known(row)} for row in found.scan_history() if "samples" in row]),
        environment=to_environment(environment if isinstance(environment, dict) else {}),
    )
    if run.status == "completed":  # what is null on disk is absent in W&B
        run.summary = dict.fromkeys(NEEDED) | run.summary
    check_run(run)
    return run


def known(value: Any) -> Any:
    """The value with what is not finite as None, at every depth."""
    if isinstance(value, dict):
        return {key: known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [known(each) for each in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return None if value in NOT_FINITE else value


def unflatten(summary: dict[str, Any]) -> dict[str, Any]:
    """Summary with ``comm_bytes_per_step/OP``, one scalar per key as W&B has them, put back into objects."""
    nested: dict[str, Any] = {}
    for key, value in summary.items():
        group, *rest = re.split("[/.]", key, maxsplit=1)
        if rest:
            inner = nested.setdefault(group, {})
            if isinstance(inner, dict):
                inner[rest[0]] = value
        else:
            nested[key] = value
    return nested
