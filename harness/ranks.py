"""One rank of a world: how it learns its place, gets the config from rank 0, and notices that it should stop.

A world ends in one of these ways, and rank 0 alone records which:
a rank raises (it leaves a note in the store), a rank dies without a word, somebody tells a rank to stop, the
launcher vanishes, or the time is up. Ranks blocked in a collective cannot run Python in their main thread, so a
watch thread does all of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from harness.config import ConfigError
from harness.environment import STOP_SIGNALS, alive, oom_kills, process_of, ranks_on_host
from harness.rundir import Status

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
TICK_S = 0.5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
GRACE_S = 25.0  # from being told to stop to the end, checkpoint or not; launchers kill after 30


class ToldToStop(Exception):
    """The run was told to end and has written a checkpoint."""


class Diverged(Exception):
    """The loss is no longer finite, or has exploded."""


@dataclass
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store
    launchers: Sequence[psutil.Process | None]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def backend(self) -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    @classmethod
    def join(cls, above: Sequence[psutil.Process | None] = ()) -> World:
        """Meet the other ranks at MASTER_ADDR:MASTER_PORT.

        Args:
            above: the launchers whose end is to end this rank.

        Raises:
            ConfigError: when the port is taken.
        """
        rank, size, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=RENDEZVOUS_TIMEOUT))
        except dist.DistNetworkError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            if "EADDRINUSE" in str(error):
                raise ConfigError(f"master_port {where}: in use; choose another with --master_port") from error
            raise ConfigError(f"master_port {where}: rank {rank} cannot reach rank 0 ({str(error)[:100]})") from error
        world = cls(rank, size, local_rank, dist.PrefixStore("harness", store), above)
        process = psutil.Process()
        world.store.set(f"process/{rank}", json.dumps([socket.gethostname(), process.pid, process.create_time()]))
        return world

    def publish(self, message: dict[str, Any]) -> None:
        """Rank 0 tells the others what to do."""
        self.store.set("message", json.dumps(message))

    def receive(self) -> dict[str, Any]:
        """What rank 0 published; waits for it."""
        while True:
            try:
                self.store.wait(["message"], timedelta(seconds=10))
                break
            except dist.DistStoreError:  # rank 0 is still at work, a large corpus can take long
                if not all(alive(process) for process in self.launchers):
                    leave(1)
        message = json.loads(self.store.get("message"))
        self.store.set(f"received/{self.rank}", "")
        return message

    def wait_until_received(self) -> None:
        """Rank 0, which keeps the store, must not leave before the others have read their message."""
        self.store.wait([f"received/{rank}" for rank in range(1, self.size)], RENDEZVOUS_TIMEOUT)

    def init_process_group(self) -> None:
        """Bring up the collectives and this rank's device."""
        bound = None
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
            bound = self.device if self.size > 1 else None
        store = dist.PrefixStore("process_group", self.store)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.size, device_id=bound)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()


def fix_threads() -> None:
    """Share the cores out over this machine's ranks, unless OMP_NUM_THREADS says otherwise."""
    asked = os.environ.get("OMP_NUM_THREADS", "")  # torch itself has read it before a forked rank had its own
    share = len(os.sched_getaffinity(0)) // ranks_on_host()
    torch.set_num_threads(int(asked) if asked.isdigit() and int(asked) > 0 else max(1, share))


def keep_freed_memory() -> None:
    """Have glibc keep what an update frees for the next one. By default it gives the end of the heap back, and on a CPU to
    fault thousands of pages in anew takes some percent of every update. Allocations of over 32 MiB stay outside the heap."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # what it adapts to by itself, until the other is set


def describe(error: BaseException) -> tuple[Status, str]:
    """Status and one-line reason of what a rank raised."""
    message = " ".join(str(error).split())[:500]
    if isinstance(error, ConfigError):
        return "failed", message
    if isinstance(error, Diverged):
        return "diverged", message
    if isinstance(error, ToldToStop):
        return "killed", message
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "CUDA out of memory" in message:
        return "oom", f"{type(error).__name__}: {message}"
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({os.path.basename(where[0].filename)}:{where[0].lineno})" if where else ""
    return "failed", f"{type(error).__name__}: {message}{place}"


class Watch(threading.Thread):
    """Notices the end of a world while the main thread may be stuck in a collective.

    Args:
        world: this rank's place.
        record: rank 0's function that writes how the run ended; it may take a few seconds.
        timeout_s: the longest the world may take, or None.
    """

    def __init__(self, world: World, record: Callable[[Status, str], None] | None, timeout_s: float | None):
        super().__init__(daemon=True, name="watch")
        self.world = world
        self.store: dist.Store = world.store.clone()  # type: ignore[attr-defined]  # a connection of its own: the main thread may be waiting on the other
        self.record = record
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.told: str | None = None  # why the run should stop at its next flush, with a checkpoint
        self.can_stop_later = False
        self._told_deadline = math.inf
        self.oom_kills = oom_kills()
        self.ending = threading.Lock()
        self._signals, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        self.start()

    def run(self) -> None:
        while True:
            readable, _, _ = select.select([self._signals], [], [], TICK_S)
            received = {signal.Signals(number) for number in os.read(self._signals, 64)} if readable else set()
            told = received & set(STOP_SIGNALS)
            if told:
                self._stop(f"received {min(told).name}")
            elif self.told is None and not all(alive(process) for process in self.world.launchers):
                self._stop("its launcher vanished")
            if time.monotonic() > self._told_deadline:
                self.end("killed", f"{self.told}; no checkpoint within {GRACE_S:g} s")
            if self.world.rank == 0 and self._notes():
                self.end("failed", "another rank failed")
            if self.deadline is not None and time.monotonic() > self.deadline and self.world.rank == 0:
                self.end("timeout", f"took longer than launch.timeout_s={self.timeout_s:g}")

    def _stop(self, reason: str) -> None:
        """End now, or once training has written a checkpoint if it can; being told again changes nothing, since a
        launcher passes on a signal that the ranks have had already. Launchers also tell when another rank has failed: that
        failure is then the end."""
        if self.told is None and self.world.rank == 0 and self._failed_elsewhere():
            self.end("failed", "another rank failed")
        if not self.can_stop_later:
            self.end("killed", reason)
        if self.told is None:
            self.told, self._told_deadline = reason, time.monotonic() + GRACE_S

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank with what it raised."""
        traceback.print_exception(error)
        status, reason = describe(error)
        self.end(status, reason)

    def end(self, status: Status, reason: str) -> NoReturn:
        """Record how the world ends, on rank 0 as the verdict over all ranks, and leave the process."""
        if not self.ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is leaving
            os._exit(1)
        try:
            self._record(status, reason)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(1)

    def _record(self, status: Status, reason: str) -> None:
        if self.world.rank != 0:
            self._leave_note(status, reason)
        elif self.record is not None:
            if status not in ("timeout", "diverged") and self.told is None:
                status, reason = self._verdict(status, reason)
            self.record(status, reason)

    def _verdict(self, status: Status, reason: str) -> tuple[Status, str]:
        """What ended the world first: an error in one rank breaks the collectives of all others."""
        noticed = time.time()
        time.sleep(0.5)
        dead = self._dead()
        notes = self._notes()
        silent = [rank for rank in dead if rank not in notes]
        if silent:
            which = ", ".join(map(str, silent))
            if oom_kills() > self.oom_kills:
                return "oom", f"rank {which} was killed for want of host memory"
            return "failed", f"rank {which} died without a word (a signal from outside, or a crash of its libraries)"
        failures = [note for note in notes.values() if note["status"] != "killed"]
        first = min(failures, key=lambda note: note["time"], default=None)
        if first and (status == "killed" or first["time"] < noticed):
            return first["status"], f"rank {first['rank']}: {first['reason']}"
        told = min(notes.values(), key=lambda note: note["time"], default=None)
        if told and told["status"] == "killed" and (status == "killed" or told["time"] < noticed):
            return "killed", told["reason"]  # what ended this rank is its echo
        return status, reason

    def _failed_elsewhere(self) -> bool:
        notes = self._notes()
        return any(note["status"] != "killed" for note in notes.values()) or bool(set(self._dead()) - set(notes))

    def _leave_note(self, status: Status, reason: str) -> None:
        note = {"rank": self.world.rank, "status": status, "reason": reason, "time": time.time()}
        try:
            self.store.set(f"note/{self.world.rank}", json.dumps(note))
        except Exception:
            traceback.print_exc()  # rank 0, which keeps the store, is gone

    def _notes(self) -> dict[int, dict[str, Any]]:
        notes = {}
        for rank in range(1, self.world.size):
            if self.store.check([f"note/{rank}"]):
                notes[rank] = json.loads(self.store.get(f"note/{rank}"))
        return notes

    def _dead(self) -> list[int]:
        """The other ranks of this host whose processes are gone."""
        gone = []
        for rank in range(1, self.world.size):
            if self.store.check([f"process/{rank}"]):
                host, pid, started = json.loads(self.store.get(f"process/{rank}"))
                if host == socket.gethostname() and not alive(process_of(pid, started)):
                    gone.append(rank)
        return gone


def leave(code: int) -> NoReturn:
    """Leave without interpreter shutdown, in which gloo's threads can abort a rank that has done all its work."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
