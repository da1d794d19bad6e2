"""Learning-rate rules and schedules, in numbers."""

import pytest

from harness.config import LRConfig
from harness.lr import rate_at, scaled_rate


@pytest.mark.parametrize(("batch", "rate"), [(512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6), (8192, 3.2)])
def test_linear_rule_of_goyal_2017(batch, rate):
    assert scaled_rate(LRConfig(0.1, 256, "linear"), batch) == pytest.approx(rate, abs=1e-12)


def test_linear_rule_of_mlperf_405b():
    rates = [scaled_rate(LRConfig(8e-5, 1152, "linear"), batch) for batch in (1152, 2304, 4608, 9216)]
    assert rates == pytest.approx([8e-5, 1.6e-4, 3.2e-4, 6.4e-4], abs=1e-9)


def test_sqrt_rule_and_none():
    assert scaled_rate(LRConfig(1e-3, 32, "sqrt"), 128) == pytest.approx(2e-3)
    assert scaled_rate(LRConfig(1e-3, 32, "none"), 128) == 1e-3


def test_warm_up_counts_samples():
    lr = LRConfig(1.0, 10, "none", warmup_samples=100)
    rates = [rate_at(lr, samples, 10, 1000) for samples in (0, 10, 80, 90, 100)]
    assert rates == pytest.approx([0.1, 0.2, 0.9, 1.0, 1.0])
    assert rate_at(lr, 0, 20, 1000) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "half", "end"), [("constant", 1, 1), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedules_decay_from_the_end_of_warm_up_to_the_final_fraction(schedule, half, end):
    lr = LRConfig(1.0, 10, "none", warmup_samples=100, schedule=schedule, final_fraction=0.1)
    assert rate_at(lr, 100, 10, 1100) == pytest.approx(1)
    assert rate_at(lr, 600, 10, 1100) == pytest.approx(half)
    assert rate_at(lr, 1100, 10, 1100) == pytest.approx(end)
