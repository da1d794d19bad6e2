"""Which gradients reach the weights when: a parameter server with N logical workers, simulated event by event.

Engine update k computes gradient k at today's weights. A schedule's ``advance`` then says whose pending gradients
arrive before the next worker may pull the weights: none, one or several arrivals, each of which may complete a
weight update. Pure arithmetic, the same on every rank.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.clock import Clock, read_trace
from harness.config import AsyncConfig, ParallelConfig, SyncConfig


@dataclass(frozen=True)
class WeightUpdate:
    """One step of the optimizer, with the mean of one or more gradients.

    Attributes:
        staleness: of each gradient in order of arrival: weight updates between its pull and this update.
        applied: gradients applied before this update.
    """

    staleness: tuple[int, ...]
    applied: int


@dataclass(frozen=True)
class Arrival:
    """A gradient that reaches the server.

    Attributes:
        gradient: the engine update that computed it, from 0.
        worker: who computed it; -1: all workers together.
        staleness: weight updates since its worker pulled.
        time_s: simulated seconds since the start.
        update: the weight update it completes, if any.
    """

    gradient: int
    worker: int
    staleness: int
    time_s: float
    update: WeightUpdate | None


@dataclass
class Tally:
    """What happened so far. computed = applied + dropped + pending (in flight or in an incomplete group)."""

    now_s: float = 0.0  # simulated time
    computed: int = 0  # gradients
    applied: int = 0  # gradients that reached the weights
    dropped: int = 0  # gradients computed but never applied
    updates: int = 0  # weight updates, the version of the weights
    staleness_counts: Counter[int] = field(default_factory=Counter)  # of the applied gradients

    @property
    def pending(self) -> int:
        return self.computed - self.applied - self.dropped

    @property
    def staleness_mean(self) -> float | None:
        """Over every applied gradient; None before the first."""
        total = sum(staleness * count for staleness, count in self.staleness_counts.items())
        return total / self.applied if self.applied else None

    def apply(self, staleness: tuple[int, ...]) -> WeightUpdate:
        update = WeightUpdate(staleness, self.applied)
        self.applied += len(staleness)
        self.updates += 1
        self.staleness_counts.update(staleness)
        return update

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "staleness_counts": sorted(self.staleness_counts.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, staleness_counts=Counter(dict(state["staleness_counts"])))


class Schedule(Protocol):
    """What happens after each engine update. Its state is plain data: numbers, strings and lists."""

    tally: Tally

    def advance(self, last: bool = False) -> tuple[Arrival, ...]:
        """The arrivals that follow the next gradient, until another one may be computed.

        Args:
            last: no gradient will be computed after this one: the pending ones are drained.
        """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class AsyncSchedule:
    """Asynchronous stochastic gradient descent. A worker pulls at its own arrival, even within a group.

    Unbounded, exactly one worker pulls at each version when every gradient is an update of its own, so that N - 1
    gradients stay pending. Workers that may pull at the same moment do so in the order they became free; gradients
    that arrive at the same moment do so in the order they were computed.

    Args:
        workers: N.
        sequences: of one gradient.
        gradients_per_update: gradients averaged in a weight update (n-softsync: N / n of them, Zhang 2015,
            arXiv:1511.05950; K-batch-async, Dutta 2018, arXiv:1803.01113).
        max_staleness: a worker starts its next gradient only while it has pushed at most this many more than the
            slowest worker (stale synchronous parallel, Ho et al. 2013); None: unbounded. A gradient's staleness in
            updates is then at most :func:`staleness_bound`.
        drain: what becomes of the pending gradients at the end: ``apply`` or ``drop``.
    """

    def __init__(
        self,
        clock: Clock,
        workers: int,
        sequences: float,
        gradients_per_update: int = 1,
        max_staleness: int | None = None,
        drain: str = "apply",
    ):
        self.tally = Tally()
        self._clock = clock
        self._sequences = sequences
        self._per_update = gradients_per_update
        self._max_staleness = max_staleness
        self._drain = drain
        self._free = list(range(workers))  # in the order they became free
        self._pushed = [0] * workers
        self._computing: list[tuple[float, int, int, int]] = []  # heap of (finish, gradient, worker, version)
        self._group: list[int] = []  # staleness of the gradients of an incomplete update

    def advance(self, last: bool = False) -> tuple[Arrival, ...]:
        worker = self._next_to_pull()
        assert worker is not None
        self._free.remove(worker)
        tally = self.tally
        finish = tally.now_s + self._clock.seconds(worker, self._pushed[worker], self._sequences)
        heapq.heappush(self._computing, (finish, tally.computed, worker, tally.updates))
        tally.computed += 1
        arrivals = []
        draining = last and self._drain == "apply"
        while self._computing and (draining or self._next_to_pull() is None):
            arrivals.append(self._arrive(close=draining and len(self._computing) == 1))
        if last and self._drain == "drop":
            self._drop_pending()
        return tuple(arrivals)

    def _next_to_pull(self) -> int | None:
        if self._max_staleness is None:
            return self._free[0] if self._free else None
        limit = min(self._pushed) + self._max_staleness
        return next((worker for worker in self._free if self._pushed[worker] <= limit), None)

    def _arrive(self, close: bool) -> Arrival:
        """The earliest pending gradient arrives; `close` completes its group however short it is."""
        self.tally.now_s, gradient, worker, version = heapq.heappop(self._computing)
        staleness = self.tally.updates - version
        self._pushed[worker] += 1
        self._free.append(worker)
        self._group.append(staleness)
        update = None
        if close or len(self._group) == self._per_update:
            update = self.tally.apply(tuple(self._group))
            self._group.clear()
        return Arrival(gradient, worker, staleness, self.tally.now_s, update)

    def _drop_pending(self) -> None:
        self.tally.dropped += len(self._computing) + len(self._group)
        for _, _, worker, _ in sorted(self._computing):
            self._pushed[worker] += 1
            self._free.append(worker)
        self._computing.clear()
        self._group.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "tally": self.tally.state_dict(),
            "free": list(self._free),
            "pushed": list(self._pushed),
            "computing": [list(pending) for pending in sorted(self._computing)],
            "group": list(self._group),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the same workers.

        Raises:
            ValueError: for the state of another number of workers.
        """
        if len(state["pushed"]) != len(self._pushed):
            raise ValueError(
                f"parallel.workers={len(self._pushed)}: the checkpoint has {len(state['pushed'])} workers; "
                f"resume with that number"
            )
        self.tally.load_state_dict(state["tally"])
        self._free, self._pushed, self._group = list(state["free"]), list(state["pushed"]), list(state["group"])
        self._computing = [(finish, k, worker, version) for finish, k, worker, version in state["computing"]]


class SyncSchedule:
    """Synchronous data parallelism: each engine update is one weight update, as slow as its slowest worker.

    Args:
        workers: N, each of which computes `sequences` sequences.
        backup_workers: b; a step takes the N-th smallest of N + b times (Chen 2016, arXiv:1604.00981). What the b
            slowest would have computed is cancelled: it uses no samples and does not change the weights.
    """

    def __init__(self, clock: Clock, workers: int, sequences: float, backup_workers: int = 0):
        self.tally = Tally()
        self._clock = clock
        self._workers = workers
        self._sequences = sequences
        self._backup_workers = backup_workers

    def advance(self, last: bool = False) -> tuple[Arrival, ...]:
        step = self.tally.computed
        times = (self._clock.seconds(w, step, self._sequences) for w in range(self._workers + self._backup_workers))
        self.tally.now_s += sorted(times)[self._workers - 1]
        self.tally.computed += 1
        return (Arrival(step, -1, 0, self.tally.now_s, self.tally.apply((0,))),)

    def state_dict(self) -> dict[str, Any]:
        return {"tally": self.tally.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.load_state_dict(state["tally"])


def build_schedule(parallel: ParallelConfig, global_batch_size: int, seed: int) -> AsyncSchedule | SyncSchedule:
    """The schedule of a resolved config: its clock, workers and sequences per gradient."""
    assert parallel.workers is not None
    clock = Clock(
        law=parallel.clock,
        mean_s=parallel.clock_mean_s,
        cv=parallel.clock_cv,
        speeds=tuple(parallel.speeds),
        trace=read_trace(parallel.trace) if parallel.trace is not None else (),
        seed=seed,
    )
    if isinstance(parallel, AsyncConfig):
        return AsyncSchedule(
            clock,
            parallel.workers,
            global_batch_size,
            parallel.gradients_per_update,
            parallel.max_staleness,
            parallel.drain,
        )
    assert isinstance(parallel, SyncConfig)
    return SyncSchedule(clock, parallel.workers, global_batch_size / parallel.workers, parallel.backup_workers)


def rate_factor(update: WeightUpdate, remedy: str = "none", lr_mode: str = "per_update") -> float:
    """Effective over scheduled learning rate of a weight update.

    ``remedy=lr_over_staleness`` divides by the mean staleness of its gradients, where that exceeds 1 (Zhang 2015,
    arXiv:1511.05950, section 3.2). ``lr_mode=match_sync`` multiplies by their number, so that a gradient moves the
    weights as far as it would have in an update of its own.
    """
    factor = float(len(update.staleness)) if lr_mode == "match_sync" else 1.0
    if remedy == "lr_over_staleness":
        factor /= max(1.0, sum(update.staleness) / len(update.staleness))
    return factor


def total_staleness(workers: int, gradients: int) -> int:
    """Sum of staleness over a drained, unbounded run with one gradient per update: exact for every law of times.

    (N - 1)(2T - N) / 2 for T >= N gradients, an integer: arrival j sees version j, and the gradients are computed at
    version 0 (N of them) and once at each of 1 .. T - N. For T < N all are computed at version 0: T(T - 1) / 2.
    """
    n = min(workers, gradients)
    return (n - 1) * (2 * gradients - n) // 2


def staleness_bound(workers: int, max_staleness: int) -> int:
    """Largest staleness under ``max_staleness`` s with one gradient per update: (N - 1)(2s + 1).

    While one gradient is computed, each other worker goes from at most s behind to at most s + 1 ahead.
    """
    return (workers - 1) * (2 * max_staleness + 1)


def expected_pending_bytes(parallel: AsyncConfig, shard_elements: int, element_bytes: int = 4) -> dict[str, int]:
    """What a rank holds between updates for its shard, at most.

    Returns:
        ``gradients``: N - 1 pending ones and the sum of an incomplete group; ``weights``: under DC-ASGD one copy per
        worker, and the adaptive form's mean square.
    """
    assert parallel.workers is not None
    gradients = parallel.workers - 1 + int(parallel.gradients_per_update > 1)
    copies = 0
    if parallel.remedy == "dc_asgd":
        copies = (parallel.workers if parallel.workers > 1 else 0) + int(parallel.dc_adaptive)
    size = shard_elements * element_bytes
    return {"gradients": gradients * size, "weights": copies * size}
