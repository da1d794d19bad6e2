"""Weights & Biases: a copy, on rank 0 only, of what the run directory holds."""

from __future__ import annotations

import netrc
import os
import re
from dataclasses import asdict
from typing import Any

from harness.config import Config, WandbConfig
from harness.rundir import RunDir, Status, config_hash, job_type


def decide_mode(settings: WandbConfig) -> str:
    """`auto` is online only with an API key, decided before W&B is first called."""
    if settings.mode != "auto":
        return settings.mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return "online" if netrc.netrc().authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class Tracker:
    """One W&B run: config, one log call per row of metrics, scalars in the summary, the right exit state."""

    def __init__(self, config: Config, run: RunDir):
        import wandb

        os.environ.pop("WANDB_RUN_ID", None)
        mode = decide_mode(config.wandb)
        attempt = (run.read_status() or {}).get("wandb_attempt", 1)
        self.run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=config.wandb.project,
            entity=config.wandb.entity,
            tags=config.wandb.tags,
            id=f"{re.sub(r'[^A-Za-z0-9_.-]', '-', config.study)}-{config_hash(config)}-{attempt}",
            name=run.path.name,
            group=config.study,
            job_type=job_type(config),
            config=asdict(config),
            dir=str(run.path),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        for axis in ("samples", "wall_s", "sim_time_s", "step"):
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric="samples")
        self.offline_dir = os.path.dirname(self.run.dir) if mode == "offline" else None

    def add_config(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    def log(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.run.log({key: value for key, value in row.items() if value is not None})

    def finish(self, summary: dict[str, Any] | None, status: Status, reason: str = "") -> None:
        """Close the run; anything but completion is marked as crashed."""
        scalars: dict[str, Any] = {"status": status, "reason": reason}
        for key, value in (summary or {}).items():
            nested = value if isinstance(value, dict) else {}
            scalars |= {f"{key}/{name}": number for name, number in nested.items()} or {key: value}
        self.run.summary.update({key: value for key, value in scalars.items() if value is not None})
        self.run.finish(exit_code=0 if status == "completed" else 1)
