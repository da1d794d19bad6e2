"""What theory expects of synchronous and asynchronous workers, to be held against the emulation.

N workers, service times of mean 1 unless a function says otherwise, no time for server and network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from harness.clock import STRAGGLER_SHARE, lognormal_sigma, straggler_times

QUADRATURE_LIMIT = 12.0  # standard deviations
QUADRATURE_STEPS = 6000


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


def expected_arrival(law: str, workers: int, rank: int | None = None, cv: float = 0.1) -> float:
    """Expected time of the `rank`-th of `workers` to finish, in mean service times; the last by default.

    The slowest gives the step of synchronous training, the K-th that of K-sync and of backup workers. Exponential:
    H_N - H_(N-K) (Dutta 2018, arXiv:1803.01113). Lognormal: quadrature of the order statistic's density, relative
    error below 1e-6. Stragglers: binomial.

    Args:
        law: ``constant``, ``exponential``, ``lognormal`` or ``stragglers``, as in :class:`harness.clock.Clock`.
    """
    k = workers if rank is None else rank
    if not 1 <= k <= workers:
        raise ValueError(f"rank={k}: must be between 1 and workers={workers}")
    if law == "constant":
        return 1.0
    if law == "exponential":
        return harmonic(workers) - harmonic(workers - k)
    if law == "lognormal":
        return _lognormal_order_statistic(workers, k, lognormal_sigma(cv))
    if law == "stragglers":
        fast, slow = straggler_times(cv)
        p = STRAGGLER_SHARE
        too_few_fast = math.fsum(math.comb(workers, i) * (1 - p) ** i * p ** (workers - i) for i in range(k))
        return fast + (slow - fast) * too_few_fast
    raise ValueError(f"law={law}: choose one of constant, exponential, lognormal, stragglers")


def _lognormal_order_statistic(n: int, k: int, sigma: float) -> float:
    normal = NormalDist()
    log_count = math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 1)
    step = 2 * QUADRATURE_LIMIT / QUADRATURE_STEPS
    terms = []
    for i in range(QUADRATURE_STEPS + 1):
        z = -QUADRATURE_LIMIT + i * step
        below, above = normal.cdf(z), normal.cdf(-z)
        if below > 0 and above > 0:
            log_density = log_count + (k - 1) * math.log(below) + (n - k) * math.log(above) + math.log(normal.pdf(z))
            terms.append(math.exp(log_density + sigma * z - sigma * sigma / 2))
    return math.fsum(terms) * step


def update_rate(workers: int, gradients_per_update: int = 1) -> float:
    """Asynchronous weight updates per mean service time, for every law: N / K."""
    return workers / gradients_per_update


def server_throughput(think_s: float, service_s: float, workers: int) -> float:
    """Gradients per second through a server that takes `service_s` for each, of workers that compute `think_s`.

    Exact mean value analysis of the machine-repairman queue: R = S (1 + Q), X = n / (Z + R), Q = X R.
    """
    queue = throughput = 0.0
    for n in range(1, workers + 1):
        response = service_s * (1 + queue)
        throughput = n / (think_s + response)
        queue = throughput * response
    return throughput


def mean_staleness(workers: int, gradients_per_update: int = 1) -> float:
    """Limit of the mean staleness in updates, for every law and any speeds: (N - 1) / K."""
    return (workers - 1) / gradients_per_update


def mean_staleness_per_worker(rates: Sequence[float]) -> list[float]:
    """Mean staleness of each worker's gradients, from gradients per second: sum of all rates / its own - 1."""
    return [math.fsum(rates) / rate - 1 for rate in rates]


def geometric_staleness(workers: int, staleness: int) -> float:
    """Probability of a staleness with exponential service: (1/N) (1 - 1/N)^s; variance N (N - 1)."""
    return (1 - 1 / workers) ** staleness / workers


def stability_limit(staleness: int) -> float:
    """Rate x curvature below which gradient descent on a quadratic converges under a constant delay.

    2 sin(pi / (2 (2 tau + 1))): where a root of z^(tau+1) - z^tau + eta lambda leaves the unit circle.
    """
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))


def delayed_descent(step: float, staleness: int, steps: int, start: float = 1.0) -> list[float]:
    """w_0 .. w_steps of w_(t+1) = w_t - eta lambda w_max(0, t - tau), `step` being eta lambda."""
    w = [start]
    for t in range(steps):
        w.append(w[t] - step * w[max(0, t - staleness)])
    return w


def break_even_overhead(law: str, workers: int, cv: float = 0.1) -> float:
    """Token overhead at equal loss up to which asynchrony wins simulated time: E[slowest of N] / E[one].

    Compute-bound, communication ignored.
    """
    return expected_arrival(law, workers, cv=cv)


def asynchrony_pays(token_overhead: float, law: str, workers: int, cv: float = 0.1) -> bool:
    """Whether asynchrony reaches a loss sooner, if it needs `token_overhead` times the tokens of sync."""
    return token_overhead < break_even_overhead(law, workers, cv)


def implicit_momentum(workers: int) -> float:
    """Momentum that exponential service adds on average: 1 - 1/N (Mitliagkas 2016, arXiv:1605.09774)."""
    return 1 - 1 / workers


def momentum_descent(step: float, workers: int, steps: int, start: float = 1.0) -> list[float]:
    """w_0 .. w_steps of w_(t+1) = w_t + (1 - 1/N) (w_t - w_(t-1)) - (eta/N) lambda w_t, `step` being eta lambda."""
    momentum = implicit_momentum(workers)
    w = [start, start - step / workers * start]
    for t in range(1, steps):
        w.append(w[t] + momentum * (w[t] - w[t - 1]) - step / workers * w[t])
    return w[: steps + 1]


def expected_descent(step: float, workers: int, steps: int, start: float = 1.0) -> list[float]:
    """w_0 .. w_steps of w_(t+1) = w_t - eta lambda sum_s P(s) w_(t-s), with geometric staleness s <= t."""
    w = [start]
    for t in range(steps):
        delayed = math.fsum(geometric_staleness(workers, s) * w[t - s] for s in range(t + 1))
        w.append(w[t] - step * delayed)
    return w


def compensated_gradient(gradient: float, now: float, pulled: float, strength: float) -> float:
    """g + lambda g g (w_now - w_pulled), one element of DC-ASGD (Zheng 2016, arXiv:1609.08326, eq. 10)."""
    return gradient + strength * gradient * gradient * (now - pulled)
