"""Worlds started from the command line as a user would, for tests of launch forms and endings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from harness.environment import RANK_VARIABLES
from harness.forkserver import free_port
from harness.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
MAIN = str(ROOT / "harness" / "main.py")
BIN = Path(sys.executable).parent
FORMS: dict[str, list[str]] = {
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "PORT", MAIN],
    "deepspeed --no_local_rank": [
        str(BIN / "deepspeed"), "--num_gpus", "2", "--no_local_rank", "--master_port", "PORT", MAIN,
    ],
    "deepspeed --module": [
        str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "PORT", "--module", "harness.main",
    ],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", "PORT", MAIN],
    "python": [sys.executable, MAIN, "launch.world_size=2"],
}  # fmt: skip
QUICK = ["+exp=zero3", "train.steps=3", "data.eval_samples=8", "data.seq_len=32", "batch.global_size=8"]


class Launched:
    """A started command, its output, and the run directory it makes below ``folder``."""

    def __init__(self, command: list[str], folder: Path, **environment: str):
        clean = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
        self.folder = folder
        self.output = open(folder / "output.txt", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(free_port()) if part == "PORT" else part for part in command],
            cwd=folder, env=clean | environment, stdin=subprocess.DEVNULL,
            stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return (self.folder / "output.txt").read_text()

    def runs(self) -> list[RunDir]:
        return [RunDir(path.parent) for path in sorted(self.folder.glob("runs/*/*/status.json"))]

    def run(self) -> RunDir:
        (run,) = self.runs()
        return run

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 90) -> Any:
        """The first true value of ``condition``; fails when the command ends or time is up before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text()
            assert self.process.poll() is None, self.text()
            time.sleep(0.1)
        return value

    def wait_for_update(self) -> RunDir:
        """The run, once it has written metrics."""
        return self.wait_until(lambda: next((run for run in self.runs() if run.read_metrics()), None))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def still_alive(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those of some processes that have not ended in time."""
    return psutil.wait_procs(processes, timeout=within_s)[1]
