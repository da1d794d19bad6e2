"""The parent of a world: starts one on a config, watches it, and says how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.checkpoint_folder import find_resume
from harness.config import Config, dump, total_steps
from harness.display import Display
from harness.environment import STOP_SIGNALS, alive, launchers, oom_kills, uncollected
from harness.forkserver import GRACE_S, Ranks, StartError, places_here
from harness.rundir import VANISHED, RunDir, Status

if TYPE_CHECKING:
    from harness.ranks import World
    from harness.screen import Screen, Unseen

POLL_S = 0.5  # between looks at a run's progress


class Stopped(BaseException):
    """This process was told to stop, or nobody waits for it any more."""


def launch(config: Config, run: RunDir, title: str, place: dict[str, str] | None = None) -> None:
    """Start a world on a run's directory and wait for its end, which ``status.json`` tells afterwards.

    Args:
        title: shown with the progress.
        place: of rank 0 of a world whose other ranks tasks like this one start (:func:`follow`); without, all ranks
            are started here.

    Raises:
        Stopped: when this process was told to stop; the world has ended and its run is recorded.
    """
    assert config.launch.world_size is not None
    display = Display(sys.stderr, total_steps(config), title)
    kills_before = oom_kills()
    ranks = Ranks([place] if place else places_here(config.launch.world_size), run.logs.resolve())
    ended: tuple[Status, str] | None = None
    with stop_signals():
        try:
            resume = find_resume(config, run)
            if resume is not None:
                display.say(f"goes on from {resume}")
            ranks.start(lead_world, order(config, run, resume), place is not None)
            ended = wait(ranks, run, display, config.launch.timeout_s)
        except StartError as error:
            ended = "failed", str(error)
            if place is not None:
                call_off(place)
        except Stopped as stop:
            ranks.end()
            ended = "killed", str(stop)
            raise
        finally:
            display.close()
            ranks.kill()
            record_end(run, ended, kills_before)


def follow(place: dict[str, str]) -> None:
    """Start the one rank of this task and wait for its end; the task that has rank 0 decides and records.

    Raises:
        Stopped: when this process was told to stop.
    """
    with tempfile.TemporaryDirectory() as folder, stop_signals():
        ranks = Ranks([place], Path(folder))
        try:
            ranks.start(be_told)
            while ranks.running():
                ranks.wait(POLL_S)
        except Stopped:
            ranks.end()
            raise
        finally:
            ranks.kill()


def call_off(place: dict[str, str]) -> None:
    """Let the tasks that follow rank 0's go: there is nothing to do."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(StartError):
        Ranks([place], Path(folder)).run(lead_world, {"exit": 1}, True)


def order(config: Config, run: RunDir, resume: Path | None) -> dict[str, Any]:
    """What rank 0 tells the others."""
    return {"config": dump(config), "run_dir": str(run.path.resolve()), "resume": resume and str(resume.resolve())}


def obey(message: dict[str, Any], world: World, screen: Screen | Unseen) -> NoReturn:
    """Do what an order says, as one of the ranks."""
    from harness.ranks import leave

    if "run_dir" not in message:
        if world.rank == 0:
            world.wait_until_received()
        leave(message["exit"])
    with uncollected():
        from harness.train import run

    resume = Path(message["resume"]) if message["resume"] else None
    run(message["config"], Path(message["run_dir"]), resume, world, screen)


def lead_world(world: World, message: dict[str, Any], others_wait: bool) -> NoReturn:
    """What rank 0 does, and every other rank whose parent knows what rank 0's does."""
    from harness.screen import Unseen

    if others_wait:
        world.publish(message)
    obey(message, world, Unseen())


def be_told(world: World) -> NoReturn:
    """What a rank does whose parent does not know."""
    from harness.screen import Screen

    screen = Screen()
    obey(world.receive(), world, screen)


def wait(ranks: Ranks, run: RunDir, display: Display, timeout_s: float | None) -> tuple[Status, str] | None:
    """Show progress until the world ends; what this process had to do about it, if anything."""
    started, tail, above = time.monotonic(), MetricsTail(run), launchers()
    while ranks.running():
        ranks.wait(POLL_S)
        if not all(alive(process) for process in above):
            raise Stopped("its launcher vanished")
        row = tail.newest()
        if row is not None:
            display.update(row)
        # The ranks end themselves at timeout_s; this is for ranks that cannot.
        if timeout_s is not None and time.monotonic() - started > timeout_s + GRACE_S:
            ranks.end()
            return "timeout", f"took longer than launch.timeout_s={timeout_s:g}"
    return None


class MetricsTail:
    """Follows the end of a growing metrics.jsonl, from where it ends now."""

    def __init__(self, run: RunDir):
        self.path = run.path / "metrics.jsonl"
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def newest(self) -> dict[str, Any] | None:
        """The last whole row written since the last call."""
        with contextlib.suppress(OSError, ValueError), open(self.path, "rb") as file:
            self.offset = min(self.offset, os.fstat(file.fileno()).st_size)  # cut back to a checkpoint
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self.offset += len(whole) + 1
                return json.loads(whole.splitlines()[-1])
        return None


def record_end(run: RunDir, ended: tuple[Status, str] | None, kills_before: int) -> None:
    """Write the status of a world that could not write its own; a full disk or the like is told, and ends nothing."""
    status = run.read_status() or {}
    stopped = ended is not None and ended[0] == "killed" and "died without a word" in status.get("reason", "")
    if status.get("status") != "running" and status.get("reason") != VANISHED and not stopped:
        return  # rank 0 wrote it
    try:
        run.write_status(*(ended or judge_silence(run, kills_before)))
    except OSError as error:
        print(f"{run.path}: how it ended cannot be recorded ({error.strerror or error})", file=sys.stderr)


def judge_silence(run: RunDir, kills_before: int) -> tuple[Status, str]:
    """What became of a world that ended by itself and said nothing."""
    if oom_kills() > kills_before:
        return "oom", "rank 0 was killed for want of host memory"
    return "failed", f"rank 0 died without a word; last line of its log: {last_line(run)}"


def last_line(run: RunDir) -> str:
    """The last words of rank 0 of a world that did not get to write a status: Python's on a crash, where it had some."""
    with contextlib.suppress(OSError):
        lines = [line for line in (run.logs / "rank0.log").read_text(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        if lines:
            return (fatal or lines)[-1][:300]
    return "(empty)"


@contextlib.contextmanager
def stop_signals() -> Any:
    """SIGINT, SIGTERM and SIGUSR1 raise :class:`Stopped` inside."""

    def stop(number: int, _: Any) -> None:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(f"received {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
