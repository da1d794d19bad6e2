"""Runs without a launcher: one, or every point of a Hydra multirun, each in a world of its own.

A point of a sweep never raises: however it ends is recorded in its run directory, its objective is then nan, and the
next point goes on. A sweep that is started again does only what is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from harness.compose import check_ranks, decide, refuse_multirun, reproducing_command
from harness.config import Config, ConfigError, one_line
from harness.display import print_outcome
from harness.environment import cache_folder, place_in_job, visible_gpus
from harness.forkserver import StartError
from harness.launch import call_off, follow, launch
from harness.rundir import GONE, RunDir, RunGoingOn, write_json

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


class Journal:
    """How the points of a sweep ended, a file each, since Hydra's launchers may run them in other processes and on other
    machines. They lie in the cache folder, which those share."""

    def __init__(self) -> None:
        sweeps = cache_folder() / "sweeps"
        try:
            sweeps.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(dir=sweeps))
        except OSError:  # no home; then all runs on this machine
            self.folder = Path(tempfile.mkdtemp())

    def add(self, study: Path, outcome: str, upload: str, took_s: float | None) -> None:
        """
        Args:
            upload: ``wandb.mode`` of the point, by which the study's report is uploaded.
            took_s: None for a point that did not run, or was kept.
        """
        record = {"study": str(study), "outcome": outcome, "upload": upload, "took_s": took_s}
        with contextlib.suppress(OSError):  # a full disk; the run's own record tells
            write_json(self.folder / f"{uuid.uuid4()}.json", record)

    def read(self) -> list[dict[str, Any]]:
        """The records so far, oldest first."""
        paths = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [json.loads(path.read_text()) for path in paths]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Sweep:
    """The points of one multirun; called by Hydra with each composed config, in whatever process its launcher chose.

    Args:
        arguments: the command line, to know how many points there will be.
        default_world_size: ranks of a point that does not say; the launcher's, under one.
    """

    def __init__(self, arguments: list[str], default_world_size: int | None):
        self.arguments = arguments
        self.default_world_size = default_world_size
        self.started = time.time()
        self.journal = Journal()

    def __call__(self, composed: DictConfig) -> float:
        """The objective of one point; where it has none nan or, to Optuna, which takes no nan, the worst."""
        value = self._point(composed)
        direction = HydraConfig.get().sweeper.get("direction")
        worst = {"minimize": math.inf, "maximize": -math.inf}.get(getattr(direction, "name", str(direction)), math.nan)
        return worst if math.isnan(value) else value

    def _point(self, composed: DictConfig) -> float:
        share_threads(self.arguments)
        total = count_points(self.arguments)
        heading = f"[{HydraConfig.get().job.num + 1}/{total or '?'}]"
        place = place_in_job()
        try:
            if place is not None and place["RANK"] != "0":
                return self._follow(composed, place)
            return self._run(composed, heading, total, place)
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else one_line(error, 300)
            return self._refused(composed, heading, reason)

    def _run(self, composed: DictConfig, heading: str, total: int | None, place: dict[str, str] | None) -> float:
        started = time.monotonic()
        config = self._decide(composed, place)
        RunDir.forget_refusal(composed)
        run = RunDir.of(config)
        kept = is_kept(run, config.launch.rerun)
        if not kept:
            try:
                run = RunDir.create(config, reproducing_command(config.launch.world_size or 1))
            except ConfigError as error:
                if place is not None:
                    call_off(place)
                if not isinstance(error, RunGoingOn):
                    raise
                self._say(f"{heading} left to another sweep: {error}")
                return math.nan
            self._say(f"{heading} {run.path.name}{self._left(total)}")
            launch(config, run, f"{heading} {run.path.name}", place)
        return self._ended(run, heading, config, None if kept else time.monotonic() - started)

    def _follow(self, composed: DictConfig, place: dict[str, str]) -> float:
        """One of the further tasks of a job: its rank joins that of the first, which records whatever happens."""
        with contextlib.suppress(ConfigError, StartError):
            config = self._decide(composed, place)
            if not is_kept(RunDir.of(config), config.launch.rerun):
                follow(place)
        return math.nan

    def _decide(self, composed: DictConfig, place: dict[str, str] | None) -> Config:
        if place is None:
            return decide_here(composed, self.default_world_size)
        gpus = visible_gpus()
        check_ranks(int(place["LOCAL_SIZE"]), gpus)
        return decide(composed, int(place["WORLD_SIZE"]), gpus)

    def _ended(self, run: RunDir, heading: str, config: Config, took_s: float | None) -> float:
        status, summary = run.read_status() or GONE, run.read_summary() or {}
        word = status["status"]
        self.journal.add(run.path.parent, word, config.wandb.mode, took_s)
        numbers = status.get("reason", "")
        if word == "completed":
            loss, speed = number_of(summary, "final_loss"), number_of(summary, "tokens_per_s")
            numbers = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        self._say(f"{heading} {'kept, ' if took_s is None else ''}{word}  {run.path.name}  {numbers}")
        return number_of(summary, config.objective) if word == "completed" else math.nan

    def _refused(self, composed: DictConfig, heading: str, reason: str) -> float:
        """A point that cannot run is a failed point like any other."""
        self._say(f"{heading} failed  {reason}")
        try:
            run = RunDir.refuse(composed, reproducing_command(composed.launch.world_size or 1), reason)
        except (OSError, ValueError) as error:
            self._say(f"{heading} and could not be recorded: {error}")
        else:
            self.journal.add(run.path.parent, "failed", "disabled", None)
        return math.nan

    def _left(self, total: int | None) -> str:
        """How long the points that are left will take, judged by those that ran."""
        records = self.journal.read()
        ran = sum(record["took_s"] is not None for record in records)
        if not ran or total is None:
            return ""
        return f"  (sweep: about {(time.time() - self.started) / ran * (total - len(records)):,.0f} s left)"

    def finish(self) -> None:
        """Say how the points ended and write the report of every study they belong to."""
        records = self.journal.read()
        if not records:
            return
        outcomes = [record["outcome"] for record in records]
        counts = ", ".join(f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes))
        self._say(f"{len(records)} points in {time.time() - self.started:,.0f} s: {counts}")
        from harness.report import write_report

        for best in sorted({Path(record["study"]) / ".sweep" / "optimization_results.yaml" for record in records}):
            if best.exists():
                self._say(f"best  {' '.join(best.read_text().split())}  ({best})")
        for study in dict.fromkeys(record["study"] for record in records):
            report = write_report([Path(study)], upload=records[-1]["upload"])
            self._say(f"report  {report / 'index.html'}")

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def is_kept(run: RunDir, rerun: str) -> bool:
    """Whether a sweep leaves an earlier point as it is."""
    status = run.read_status()
    return status is not None and status["status"] in KEPT[rerun]


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
