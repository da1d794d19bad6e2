"""Runs without a launcher: one, or every point of a Hydra multirun, each in a world of its own.

A point of a sweep never raises: however it ends is recorded in its run directory, its objective is then nan, and the
next point goes on. A sweep that is started again does only what is missing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from harness.compose import check_ranks, decide, refuse_multirun, reproducing_command
from harness.config import Config, ConfigError
from harness.display import print_outcome
from harness.environment import visible_gpus
from harness.launch import launch
from harness.rundir import GONE, RunDir, RunGoingOn

# By launch.rerun: the statuses of earlier points that a sweep leaves as they are.
KEPT = {"none": ("completed", "oom", "diverged"), "failed": ("completed",), "all": ()}


def is_multirun(arguments: list[str]) -> bool:
    return any(argument in ("-m", "--multirun") for argument in arguments)


def decide_here(composed: DictConfig, default_world_size: int | None) -> Config:
    """The config of a world on this machine: as many ranks as asked for, else the default, else one per GPU."""
    gpus = visible_gpus()
    asked = composed.launch.world_size
    world_size = asked if isinstance(asked, int) and asked > 0 else (default_world_size or gpus or 1)
    check_ranks(world_size, gpus)
    return decide(composed, world_size, gpus)


def run_once(composed: DictConfig) -> bool:
    """Run one composed config; whether it completed.

    Raises:
        ConfigError: for what can be refused before a rank starts.
    """
    refuse_multirun()
    config = decide_here(composed, None)
    run = RunDir.create(config, reproducing_command(config.launch.world_size or 1))
    launch(config, run, run.path.name)
    status = run.read_status() or GONE
    print_outcome(sys.stdout, str(run.path.resolve()), status, run.read_summary())
    return status.get("status") == "completed"


class Sweep:
    """The points of one multirun; called by Hydra with each composed config.

    Args:
        arguments: the command line, to know how many points there will be.
        default_world_size: ranks of a point that does not say; the launcher's, under one.
    """

    def __init__(self, arguments: list[str], default_world_size: int | None):
        self.arguments = arguments
        self.default_world_size = default_world_size
        self.started = time.monotonic()
        self.done = 0
        self.took_s: list[float] = []
        self.outcomes: list[str] = []
        self.studies: dict[Path, None] = {}
        self.upload = "disabled"

    def __call__(self, composed: DictConfig) -> float:
        """The objective of one point; nan where it has none."""
        if self.done == 0:
            share_threads(self.arguments)
        self.done += 1
        total = count_points(self.arguments)
        heading = f"[{self.done}/{total or '?'}]"
        try:
            return self._run(composed, heading, total)
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            return self._refused(composed, heading, reason)

    def _run(self, composed: DictConfig, heading: str, total: int | None) -> float:
        started = time.monotonic()
        config = decide_here(composed, self.default_world_size)
        RunDir.forget_refusal(composed)
        self.studies[Path(config.runs_dir).expanduser() / config.study] = None
        self.upload = config.wandb.mode
        run = RunDir.of(config)
        status = run.read_status()
        kept = status is not None and status["status"] in KEPT[config.launch.rerun]
        if not kept:
            try:
                run = RunDir.create(config, reproducing_command(config.launch.world_size or 1))
            except RunGoingOn as error:
                self._say(f"{heading} left to another sweep: {error}")
                return math.nan
            self._say(f"{heading} {run.path.name}{self._left(total)}")
            launch(config, run, f"{heading} {run.path.name}")
            self.took_s.append(time.monotonic() - started)
        return self._ended(run, heading, "kept, " if kept else "", config.objective)

    def _ended(self, run: RunDir, heading: str, kept: str, objective: str) -> float:
        status, summary = run.read_status() or GONE, run.read_summary() or {}
        word = status["status"]
        self.outcomes.append(word)
        numbers = status.get("reason", "")
        if word == "completed":
            loss, speed = number_of(summary, "final_loss"), number_of(summary, "tokens_per_s")
            numbers = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        self._say(f"{heading} {kept}{word}  {run.path.name}  {numbers}")
        return number_of(summary, objective) if word == "completed" else math.nan

    def _refused(self, composed: DictConfig, heading: str, reason: str) -> float:
        """A point that cannot run is a failed point like any other."""
        self.outcomes.append("failed")
        self._say(f"{heading} failed  {reason}")
        try:
            run = RunDir.refuse(composed, reproducing_command(composed.launch.world_size or 1), reason)
        except (OSError, ValueError) as error:
            self._say(f"{heading} and could not be recorded: {error}")
        else:
            self.studies[run.path.parent] = None
        return math.nan

    def _left(self, total: int | None) -> str:
        """How long the points that are left will take, judged by those that ran."""
        if not self.took_s or total is None:
            return ""
        return f"  (sweep: about {sum(self.took_s) / len(self.took_s) * (total - self.done + 1):,.0f} s left)"

    def finish(self) -> None:
        """Say how the points ended and write the report of every study they belong to."""
        counts = ", ".join(f"{self.outcomes.count(word)} {word}" for word in dict.fromkeys(self.outcomes))
        self._say(f"{self.done} points in {time.monotonic() - self.started:,.0f} s: {counts}")
        if self.studies:
            from harness.report import write_report

            for study in self.studies:
                self._say(f"report  {write_report([study], upload=self.upload) / 'index.html'}")

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def number_of(summary: dict[str, Any], key: str) -> float:
    """A number of a summary; nan where it has none."""
    value = summary.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan


def swept(arguments: list[str]) -> list[Override]:
    """What a multirun varies: the choices of the command line and, where it has none for a key, of an exp."""
    params = HydraConfig.get().sweeper.get("params") or {}
    choices = [argument for argument in arguments if not argument.startswith("-") and "=" in argument]
    all_choices = [*(f"{key}={value}" for key, value in params.items()), *choices]
    by_key = {each.get_key_element(): each for each in OverridesParser.create().parse_overrides(all_choices)}
    return [override for override in by_key.values() if override.is_sweep_override()]


def count_points(arguments: list[str]) -> int | None:
    """How many points a multirun has: the product of its choices, or an adaptive sweeper's number of trials."""
    sweeper: Any = HydraConfig.get().sweeper
    if "n_trials" in sweeper:
        return sweeper.n_trials
    points = 1
    for override in swept(arguments):
        if not (override.is_choice_sweep() or override.is_range_sweep()):
            return None  # a glob, or what an adaptive sweeper draws from
        points *= sum(1 for _ in override.sweep_string_iterator())
    return points


def share_threads(arguments: list[str]) -> None:
    """Give a rank as many threads in every world of a sweep as it has in the largest, unless OMP_NUM_THREADS says
    otherwise: else a small world on CPUs would have more of the machine per rank than a large one."""
    worlds = [
        int(value)
        for override in swept(arguments)
        if override.key_or_group == "launch.world_size" and (override.is_choice_sweep() or override.is_range_sweep())
        for value in override.sweep_string_iterator()
        if str(value).isdigit()
    ]
    if worlds:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, *worlds))))
