"""How long a logical worker computes: service-time laws of unit mean, drawn without state.

A time is a pure function of (seed, worker, k), k being the worker's own k-th gradient: every rank draws the same
ones, and runs that differ in synchrony or remedy meet the same slow moments.
"""

from __future__ import annotations

import csv
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean

LAWS = ("constant", "lognormal", "exponential", "stragglers", "trace")
STRAGGLER_SHARE = 0.1  # of the gradients are slow under the law `stragglers`


@dataclass(frozen=True)
class Clock:
    """Times of one gradient, in seconds.

    Args:
        law: one of ``LAWS``. ``constant``; ``lognormal`` and ``exponential`` (cv 1); ``stragglers``: one gradient in
            ten takes 1 + 3 cv times the mean, the others 1 - cv / 3; ``trace``: measured times, see `trace`.
        mean_s: mean seconds per sequence of a worker of speed 1; None: 1 s, or a trace's times as they are.
        cv: standard deviation / mean, of ``lognormal`` and ``stragglers``.
        speeds: relative speed per worker; empty: all 1.
        trace: columns of seconds per sequence, replayed cyclically: one per worker, or a single one that each
            worker enters at a place of its own drawn from the seed.
    """

    law: str = "lognormal"
    mean_s: float | None = None
    cv: float = 0.1
    speeds: tuple[float, ...] = ()
    trace: tuple[tuple[float, ...], ...] = ()
    seed: int = 0

    def seconds(self, worker: int, k: int, sequences: float) -> float:
        """What `worker` needs for its `k`-th gradient (from 0), of `sequences` sequences."""
        speed = self.speeds[worker] if self.speeds else 1.0
        return self._per_sequence(worker, k) * sequences / speed

    def _per_sequence(self, worker: int, k: int) -> float:
        if self.law == "trace":
            return self._replay(worker, k)
        mean = 1.0 if self.mean_s is None else self.mean_s
        return mean if self.law == "constant" else mean * self._unit(uniform(self.seed, worker, k))

    def _unit(self, u: float) -> float:
        """The quantile `u` of the law of mean 1."""
        if self.law == "exponential":
            return -math.log1p(-u)
        if self.law == "lognormal":
            sigma = lognormal_sigma(self.cv)
            return math.exp(sigma * NormalDist().inv_cdf(u) - sigma * sigma / 2)
        assert self.law == "stragglers"
        fast, slow = straggler_times(self.cv)
        return fast if u < 1 - STRAGGLER_SHARE else slow

    def _replay(self, worker: int, k: int) -> float:
        shared = len(self.trace) == 1
        column = self.trace[0 if shared else worker]
        start = int(uniform(self.seed, worker, -1) * len(column)) if shared else 0
        scale = 1.0 if self.mean_s is None else self.mean_s / fmean(t for times in self.trace for t in times)
        return column[(start + k) % len(column)] * scale


def uniform(seed: int, worker: int, k: int) -> float:
    """A number in (0, 1) that is a pure function of its arguments, on every platform."""
    digest = hashlib.blake2b(f"{seed}/{worker}/{k}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 11) + 0.5) / 2**53


def lognormal_sigma(cv: float) -> float:
    """Standard deviation of the logarithm, from standard deviation / mean."""
    return math.sqrt(math.log1p(cv * cv))


def straggler_times(cv: float) -> tuple[float, float]:
    """The two times of the law ``stragglers``, fast and slow, of mean 1 and the given cv (below 3)."""
    odds = math.sqrt((1 - STRAGGLER_SHARE) / STRAGGLER_SHARE)
    return 1 - cv / odds, 1 + cv * odds


def read_trace(path: str) -> tuple[tuple[float, ...], ...]:
    """Columns of a CSV file of measured times, in seconds per sequence; a header line is skipped.

    Raises:
        ValueError: in one line, for a file that cannot be read, has no times, ragged lines, or a time that is not a
            finite number above 0.
    """
    try:
        with Path(path).open(newline="") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if rows and not any(is_number(cell) for cell in rows[0]):
        rows = rows[1:]
    if not rows:
        raise ValueError("has too few times: none")
    if len({len(row) for row in rows}) > 1:
        raise ValueError("needs the same number of columns in every line")
    for row in rows:
        for cell in row:
            if not is_number(cell) or not 0 < float(cell) < math.inf:
                raise ValueError(f"time {cell.strip()!r} must be a finite number of seconds above 0")
    return tuple(tuple(float(cell) for cell in column) for column in zip(*rows, strict=True))


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
