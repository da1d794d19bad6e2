import pytest

from harness import lr
from harness.config import LRConfig
from harness.measure.noise import optimal_batch_multiplier
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("lr"))
def test_rates_scale_as_published(case):
    check(derived(case["id"], case["input"]), case)


def derived(name, given):
    if name == "lr-goyal":
        rule = LRConfig(base=given["base_lr"], base_batch_size=given["base_bs"], rule="linear")
        return {"lr": [lr.scaled_rate(rule, size) for size in given["bs"]]}
    if name == "lr-mlperf-405b":
        rule = LRConfig(base=8e-5, base_batch_size=1152, rule="linear")
        return {"lr": [round(lr.scaled_rate(rule, size), 8) for size in given["gbs"]]}
    if name.startswith("lr-adam"):
        start = lr.AdamSettings(given["lr"], (given["b1"], given["b2"]), given["eps"])
        scaled = lr.scale_adam(start, given["kappa"])
        return {"lr": scaled.lr, "b1": scaled.betas[0], "b2": scaled.betas[1], "eps": scaled.eps}
    if name.startswith("surge"):
        return {"lr_over_max": lr.surge_factor(given["B_over_Bnoise"], 1)}
    if name.endswith("autobatch"):
        return {"mult": optimal_batch_multiplier(given["ratio"], given["exp"])}
    raise AssertionError(f"no rule for {name}")


@pytest.mark.parametrize("ratio", [10, 16, 1000])
def test_the_square_root_rule_ends_where_beta_would_be_negative(ratio):
    with pytest.raises(ValueError, match=r"less than 10 at a beta of 0\.9"):
        lr.scale_adam(lr.AdamSettings(1e-3, (0.9, 0.999), 1e-8), ratio)
    assert lr.scale_adam(lr.AdamSettings(1e-3, (0.9, 0.999), 1e-8), 9.9).betas[0] == pytest.approx(0.01)


def test_the_square_root_rule_is_the_identity_at_one_and_reversible():
    plain = lr.AdamSettings(1e-3, (0.0, 0.999), 1e-8)
    assert lr.scale_adam(plain, 1).betas == pytest.approx(plain.betas)
    back = lr.scale_adam(lr.scale_adam(plain, 0.25), 4 * (1 - 1e-9))
    assert back.lr == pytest.approx(plain.lr)


def test_rates_at_the_noise_scale():
    assert lr.noise_limited_factor(1000, 1000) == 0.5
    assert lr.surge_factor(250, 1000) == pytest.approx(lr.surge_factor(4000, 1000))
    for factor in (lr.surge_factor, lr.noise_limited_factor):
        with pytest.raises(ValueError, match="batch=0"):
            factor(0, 1000)
