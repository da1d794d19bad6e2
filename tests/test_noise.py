import math

import numpy as np
import pytest

from harness.measure import noise
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("cbs"))
def test_critical_batches_are_as_published(case):
    check(derived(case["id"], case["input"]), case)


def derived(name, given):
    if "B_over_Bcrit" in given or "B_noise" in given:
        critical = given.get("B_noise", 1)
        batches = given.get("B", given.get("B_over_Bcrit"))
        laws = {"S": noise.steps_ratio, "E": noise.samples_ratio, "eff": noise.sample_efficiency}
        if isinstance(batches, list):
            return {key: [law(batch, critical) for batch in batches] for key, law in laws.items()}
        return {key: law(batches, critical) for key, law in laws.items()}
    if name == "gns-exact":
        found = noise.estimate_noise(given["g2_small"], given["g2_big"], given["b"], given["B"])
        return {"G2": found.signal, "S": found.noise, "Bsimple": found.scale}
    if name == "gns-mc":
        found = monte_carlo(given)
        return {"G2": found.signal, "S": found.noise, "ratio": found.scale}
    if name.startswith("kaplan"):
        return {
            "tokens_kaplan": [noise.critical_batch_at_loss(loss) for loss in given["L"]],
            "tokens_nanogpt": [noise.critical_batch_at_loss(loss, 2.2e7, 4.26) for loss in given["L"]],
        }
    if name == "cbs-definitions":
        return {"B_over_Bcrit": [noise.batch_of_efficiency(0.5, 1), noise.batch_of_overhead(0.2, 1)]}
    raise AssertionError(f"no formula for {name}")


def monte_carlo(given):
    """Ranks' mean gradients drawn around a true one, as data parallelism sees them."""
    rng = np.random.default_rng(0)
    ranks, batch, size, steps = given["ranks"], given["b"], given["d"], given["reps"]
    true = math.sqrt(given["G2"] / size)
    average = noise.NoiseAverage(decay=0.9999)
    for _ in range(steps):
        local = true + math.sqrt(given["S"] / size / batch) * rng.standard_normal((ranks, size), dtype=np.float32)
        small = float((local**2).sum(axis=1).mean())
        big = float((local.mean(axis=0) ** 2).sum())
        found = average.update(noise.estimate_noise(small, big, batch, batch * ranks))
    return found


def test_averages_start_without_bias():
    average = noise.NoiseAverage(decay=0.99)
    for _ in range(3):
        found = average.update(noise.GradientNoise(4.0, 100.0))
        assert (found.signal, found.noise, found.scale) == (pytest.approx(4), pytest.approx(100), pytest.approx(25))


def test_the_trade_of_steps_for_samples_is_a_hyperbola():
    for batch in (3, 70, 5000):
        steps, samples = noise.steps_ratio(batch, 70), noise.samples_ratio(batch, 70)
        assert (steps - 1) * (samples - 1) == pytest.approx(1)
    assert noise.critical_batch_of(fewest_samples=7e6, fewest_steps=1e5) == 70


def test_a_signal_lost_in_noise_has_no_finite_scale():
    assert noise.estimate_noise(10, 0.1, 8, 64).scale == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise.estimate_noise(1, 1, 8, 8), "small_batch=8"),
        (lambda: noise.steps_ratio(0, 10), "batch=0"),
        (lambda: noise.critical_batch_at_loss(0), "loss=0"),
        (lambda: noise.batch_of_efficiency(1, 10), "efficiency=1"),
        (lambda: noise.NoiseAverage(1), "decay=1"),
    ],
)
def test_impossible_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
