"""Theory of synchronous and asynchronous workers: published and derived values."""

import math

import pytest

from harness.asynchrony import (
    asynchrony_pays,
    break_even_overhead,
    compensated_gradient,
    delayed_descent,
    expected_arrival,
    expected_descent,
    geometric_staleness,
    mean_staleness,
    mean_staleness_per_worker,
    momentum_descent,
    server_throughput,
    stability_limit,
    update_rate,
)
from harness.clock import Clock


@pytest.mark.parametrize(
    "workers, expected", [(2, 1.5), (8, 2.717857), (32, 4.058495), (64, 4.743891), (1024, 7.509176)]
)
def test_slowest_of_exponential_workers_is_a_harmonic_number(workers, expected):
    assert expected_arrival("exponential", workers) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("workers, rank, expected", [(8, 6, 1.217857), (8, 4, 0.634524), (100, 96, 3.104044)])
def test_k_th_of_exponential_workers_as_in_dutta_2018(workers, rank, expected):
    assert expected_arrival("exponential", workers, rank) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sigma, expected", [(0.1, 1.149), (0.25, 1.399), (0.5, 1.887), (1.0, 3.085)])
def test_slowest_of_eight_lognormal_workers(sigma, expected):
    cv = math.sqrt(math.expm1(sigma**2))
    assert expected_arrival("lognormal", 8, cv=cv) == pytest.approx(expected, rel=0.01)
    assert expected_arrival("lognormal", 1, cv=cv) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("law", ["constant", "exponential", "lognormal", "stragglers"])
@pytest.mark.parametrize("rank", [8, 5])
def test_expected_arrivals_are_those_of_the_clock(law, rank):
    clock = Clock(law, cv=0.8)
    draws = 20_000
    total = sum(sorted(clock.seconds(w, k, 1) for w in range(8))[rank - 1] for k in range(draws))
    assert total / draws == pytest.approx(expected_arrival(law, 8, rank, cv=0.8), rel=0.015)


def test_arrival_rank_outside_the_workers_is_refused():
    with pytest.raises(ValueError, match="between 1 and workers=4"):
        expected_arrival("exponential", 4, 5)


@pytest.mark.parametrize(
    "workers, expected", [(1, 0.9091), (2, 1.8033), (4, 3.5334), (8, 6.6168), (16, 9.777), (32, 10.0)]
)
def test_server_contention_by_mean_value_analysis(workers, expected):
    assert server_throughput(1.0, 0.1, workers) == pytest.approx(expected, abs=1e-3)


def test_mean_staleness_of_heterogeneous_workers():
    rates = [1, 1, 1, 0.25]
    assert mean_staleness_per_worker(rates) == pytest.approx([2.25, 2.25, 2.25, 12.0])
    share = [rate / sum(rates) for rate in rates]
    assert sum(s * m for s, m in zip(share, mean_staleness_per_worker(rates), strict=True)) == pytest.approx(3)


def test_mean_staleness_of_softsync_as_in_zhang_2015():
    assert [mean_staleness(30, 30 // n) for n in (1, 15, 30)] == pytest.approx([29 / 30, 14.5, 29])
    assert update_rate(30, 15) == 2


def test_geometric_staleness_sums_to_one_with_mean_and_variance():
    p = [geometric_staleness(4, s) for s in range(400)]
    mean = sum(s * q for s, q in enumerate(p))
    variance = sum((s - mean) ** 2 * q for s, q in enumerate(p))
    assert (p[0], sum(p), mean, variance) == pytest.approx((0.25, 1, 3, 12))


@pytest.mark.parametrize("staleness, expected", [(0, 2.0), (1, 1.0), (2, 0.6180339887498948), (7, 0.20905692653530691)])
def test_stability_limit_separates_converging_from_diverging_descent(staleness, expected):
    assert stability_limit(staleness) == pytest.approx(expected, abs=1e-12)
    below, above = (delayed_descent(f * expected, staleness, 6000) for f in (0.98, 1.02))
    assert max(map(abs, below[-50:])) < 1e-4
    assert max(map(abs, above[-50:])) > 1e4


def test_exponential_asynchrony_equals_momentum_as_in_mitliagkas_2016():
    pairs = zip(momentum_descent(0.1, 8, 300), expected_descent(0.1, 8, 300), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-12


def test_delay_compensation_of_zheng_2016():
    gradient = compensated_gradient(0.5, now=1.0, pulled=0.8, strength=0.04)
    assert gradient == pytest.approx(0.502, abs=1e-12)
    assert 1.0 - 0.1 * gradient == pytest.approx(0.9498, abs=1e-12)


def test_break_even_overhead_is_the_price_of_waiting():
    assert break_even_overhead("exponential", 8) == pytest.approx(2.717857, abs=1e-6)
    assert asynchrony_pays(2.42, "exponential", 8) and not asynchrony_pays(2.42, "lognormal", 8, cv=0.25)
    assert not asynchrony_pays(1.0, "constant", 8)
