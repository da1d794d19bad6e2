"""The ranks of a world on this machine, forked from a process that has imported everything.

Python's fork server imports torch, DeepSpeed and transformers once for all ranks of all points of a sweep. Each rank
is a process, session and log of its own, so that nothing leaks from one world into the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

import psutil

from harness.config import one_line
from harness.environment import RANK_VARIABLES, alive, process_of

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["harness.preload"])
GRACE_S = 30.0  # from telling a world to end until it is killed
ROOT = Path(__file__).resolve().parent.parent


@cache
def server_output() -> IO[str]:
    """What the server prints, and ranks that have no log yet."""
    return tempfile.TemporaryFile("w+")


def start_server() -> None:
    """Start the process that ranks are forked from, unless it is there; it imports while this one goes on."""
    import_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # To ask the driver how many GPUs there are would start CUDA, which does not survive a fork.
    variables = {"PYTHONPATH": import_path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with mock.patch.dict(os.environ, variables), quiet_without_ctrl_c():
        forkserver.ensure_running()


@contextlib.contextmanager
def quiet_without_ctrl_c() -> Iterator[None]:
    """A process started inside prints to ``server_output`` and does not hear Ctrl-C; this one hears it afterwards."""
    screen = [os.dup(descriptor) for descriptor in (1, 2)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for descriptor in (1, 2):
            os.dup2(server_output().fileno(), descriptor)
        yield
    finally:
        for descriptor, kept in zip((1, 2), screen, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class StartError(Exception):
    """Ranks could not be started."""


class Ranks:
    """Processes of one world.

    Args:
        places: what a launcher would put into the environment of each (:func:`places_here`).
        logs: folder of their logs, ``rank0.log`` and so on.
    """

    def __init__(self, places: list[dict[str, str]], logs: Path):
        self.places, self.logs = places, logs
        self._started: list[tuple[ForkServerProcess, psutil.Process | None]] = []

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start all ranks; each calls ``function(world, *arguments)``, all of it picklable, and leaves.

        Raises:
            StartError: when the server cannot import what they need.
        """
        here = psutil.Process()
        parent = (here.pid, here.create_time())
        inherited = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
        try:
            start_server()
            with start_method():
                for place in self.places:
                    log = self.logs / f"rank{place['RANK']}.log"
                    arguments_of_rank = (inherited | place, log, parent, function, arguments)
                    process = FORKS.Process(target=be_rank, args=arguments_of_rank)
                    process.start()
                    self._started.append((process, process_with(process.pid)))
        except (OSError, EOFError) as error:  # the server is gone
            raise StartError(f"ranks cannot be started: {last_words() or why_not(error)}") from error

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start all ranks and wait for their end.

        Raises:
            StartError: as :meth:`start`.
        """
        try:
            self.start(function, *arguments)
            while self.running():
                self.wait(1)
        finally:
            self.kill()

    def running(self) -> bool:
        """Whether any rank lives; where one has failed, the others are made to end."""
        living = self._living()
        fell = any(process.exitcode for process, handle in self._started if not alive(handle))
        if living and fell:
            self.end()
            return False
        return bool(living)

    def wait(self, seconds: float) -> None:
        """Until a rank ends, at most so long."""
        sentinels = [process.sentinel for process, _ in self._started if process.exitcode is None]
        if sentinels:
            connection.wait(sentinels, seconds)
        else:  # their server is gone
            time.sleep(seconds)

    def end(self) -> None:
        """Tell every rank to end, and make sure."""
        for handle in self._living():
            with contextlib.suppress(psutil.NoSuchProcess):
                handle.terminate()
        deadline = time.monotonic() + GRACE_S
        while self._living() and time.monotonic() < deadline:
            self.wait(0.1)
        self.kill()

    def kill(self) -> None:
        """Nothing of an ended world stays behind."""
        for process, _ in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # a started process has one

    def _living(self) -> list[psutil.Process]:
        return [handle for _, handle in self._started if handle is not None and alive(handle)]


def process_with(pid: int | None) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def last_words() -> str:
    """The error that has ended the server's imports, if one has."""
    with contextlib.suppress(OSError):
        server_output().seek(0)
        for line in server_output().read().strip().splitlines()[-1:]:
            return line[:300] if re.match(r"[\w.]*(Error|Exception)\b", line) else ""
    return ""


def why_not(error: BaseException) -> str:
    if isinstance(error, (EOFError, ConnectionError)):
        return "the process that they are forked from was killed"
    return f"{one_line(error)}{'; set a shorter TMPDIR' if 'AF_UNIX' in str(error) else ''}"


@contextlib.contextmanager
def start_method() -> Iterator[None]:
    """Ranks are told how processes of theirs are to be started: not as joblib's workers do, which this may be one of."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def places_here(size: int) -> list[dict[str, str]]:
    """What a launcher would tell each rank of a world on this machine."""
    shared = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{key: str(value) for key, value in {**shared, "RANK": n, "LOCAL_RANK": n}.items()} for n in range(size)]


def be_rank(
    variables: dict[str, str], log: Path, parent: tuple[int, float], function: Callable[..., Any], arguments: tuple
) -> NoReturn:
    """A forked process: meet the other ranks, call the function, leave."""
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank{variables['RANK']}")  # its name in top and ps
    with open(log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()  # a crash inside a library leaves its place in the log
    from harness.ranks import World, leave

    joined, above = threading.Event(), process_of(*parent)
    threading.Thread(target=leave_with, args=(above, joined), daemon=True).start()
    world = World.join([above])
    joined.set()
    function(world, *arguments)
    leave(0)


def leave_with(parent: psutil.Process | None, joined: threading.Event) -> None:
    """Do not wait for ranks that a dead parent will never start; once they have met, they look for themselves."""
    while not joined.wait(1):
        if not alive(parent):
            os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
