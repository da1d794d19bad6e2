"""The parent of a world: starts one on a config, watches it, and says how it ended."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from harness.checkpoint_folder import find_resume
from harness.config import Config, total_steps
from harness.display import Display
from harness.environment import RANK_VARIABLES, STOP_SIGNALS, WATCH_PARENT, alive, launchers, oom_kills
from harness.rundir import VANISHED, RunDir, Status

MAIN = Path(__file__).resolve().parent / "main.py"
POLL_S = 0.1
GRACE_S = 30.0  # from telling a world to end until it is killed


class Stopped(BaseException):
    """This process was told to stop, or nobody waits for it any more."""


def launch(config: Config, run: RunDir, title: str) -> None:
    """Start a world on a run's directory and wait for its end, which ``status.json`` tells afterwards.

    Args:
        title: shown with the progress.

    Raises:
        Stopped: when this process was told to stop; the world has ended and its run is recorded.
    """
    assert config.launch.world_size is not None
    display = Display(sys.stderr, total_steps(config), title)
    kills_before = oom_kills()
    world: subprocess.Popen[bytes] | None = None
    ended: tuple[Status, str] | None = None
    with stop_signals():
        try:
            resume = find_resume(config, run)
            if resume is not None:
                display.say(f"goes on from {resume}")
            with open(run.logs / "launcher.log", "ab") as log:
                world = subprocess.Popen(
                    world_command(config.launch.world_size, run.path.resolve(), resume),
                    env=world_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            ended = wait(world, run, display, config.launch.timeout_s)
            wait_for_group(world.pid)
        except Stopped as stop:
            if world is not None:
                end_world(world)
            ended = ("killed", str(stop))
            raise
        finally:
            display.close()
            if world is not None:
                kill_group(world.pid)
            record_end(run, ended, kills_before)


def wait(
    world: subprocess.Popen[bytes], run: RunDir, display: Display, timeout_s: float | None
) -> tuple[Status, str] | None:
    """Show progress until the world ends; what this process had to do about it, if anything."""
    started, tail, above = time.monotonic(), MetricsTail(run), launchers()
    while world.poll() is None:
        time.sleep(POLL_S)
        if not all(alive(process) for process in above):
            raise Stopped("its launcher vanished")
        row = tail.newest()
        if row is not None:
            display.update(row)
        if is_over(world, run):
            end_world(world)
            return None
        # The ranks end themselves at timeout_s; this is for ranks that cannot.
        if timeout_s is not None and time.monotonic() - started > timeout_s + GRACE_S:
            end_world(world)
            return "timeout", f"took longer than launch.timeout_s={timeout_s:g}"
    return None


def is_over(world: subprocess.Popen[bytes], run: RunDir) -> bool:
    """Whether the end is recorded and no rank is left; DeepSpeed's launcher takes up to two seconds more to see it."""
    status = run.read_status()
    if status is None or status["status"] == "running":
        return False
    with contextlib.suppress(psutil.Error):
        return not any(alive(child) for child in psutil.Process(world.pid).children())
    return False


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
    """The last words of the logs of a world that did not get to write a status: Python's on a crash, where it had some."""
    for name in ("rank0.log", "launcher.log"):
        with contextlib.suppress(OSError):
            lines = [line for line in (run.logs / name).read_text(errors="replace").splitlines() if line.strip()]
            fatal = [line for line in lines if line.startswith("Fatal Python error")]
            if lines:
                return (fatal or lines)[-1][:300]
    return "(empty)"


def world_command(world_size: int, run_dir: Path, resume: Path | None) -> list[str]:
    """What starts the ranks of a run, which goes on from a checkpoint or begins."""
    options = [f"--run-dir={run_dir}", *([f"--resume={resume.resolve()}"] if resume else [])]
    return launcher_command(world_size, str(MAIN), *options)


def launcher_command(world_size: int, *program: str) -> list[str]:
    """DeepSpeed's launcher for ranks on this machine; without its runner, which would import DeepSpeed once more.

    Args:
        program: a script or ``--module`` and a module's name, with its arguments.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [d.strip() for d in visible.split(",")][:world_size] if visible else list(range(world_size))
    info = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    return [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={info}", "--master_addr=127.0.0.1",
        f"--master_port={free_port()}", *program,
    ]  # fmt: skip


def world_environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    own = psutil.Process()
    environment[WATCH_PARENT] = f"{own.pid}@{own.create_time()}"
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def end_world(world: subprocess.Popen[bytes]) -> None:
    """Tell every process of the world to end, and make sure."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(world.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        world.wait(GRACE_S)
    kill_group(world.pid)
    world.wait()


def wait_for_group(group: int) -> None:
    """Give ranks whose launcher was killed the time to notice and to record it."""
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(POLL_S)


def kill_group(group: int) -> None:
    """Nothing of an ended world stays behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
