import pytest

from harness import scaling
from harness.measure import flops
from harness.shape import read_shape
from harness.traffic import ring_factor
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("scaling"))
def test_scaling_is_as_published(case):
    check(derived(case["id"], case["input"]), case)


def gpt(given):
    sizes = {"n_embd": given["h"], "n_layer": given["L"], "n_head": 1, "vocab_size": given["V"]}
    return read_shape(sizes | {"n_positions": given["s"]}, "gpt2")


def derived(name, given):
    if name.startswith("mpt-weak"):
        return {"eff": [scaling.weak_efficiency(rate, given["base8"]) for rate in given["tok"]]}
    if name.startswith("ds-bert"):
        first = (given["gpus"][0], given["minutes"][0])
        runs = zip(given["gpus"], given["minutes"], strict=True)
        return {"eff": [scaling.strong_efficiency(gpus, minutes, *first) for gpus, minutes in runs]}
    if name.startswith("megatron"):
        per_token = flops.hardware_flops_per_token(gpt(given), given["s"], "full", reentrant=True, attention="full")
        return {"days": scaling.days_to_train(per_token, given["tokens"], given["gpus"], given["tflops"] * 1e12)}
    if name.startswith("zero3-maxmodel"):
        shape = gpt({"h": 12288, "L": 96, "V": 51200, "s": 2048})
        per_token = flops.hardware_flops_per_token(shape, 2048, "full", reentrant=True, attention="full")
        reached = []
        for gpus, sequences in given["rows"]:
            work = per_token * 2048 * sequences
            sent = 3 * 2 * shape.params * ring_factor("all_gather", gpus)
            compute = work / (given["calibrate"]["peak_eff_TF"] * 1e12)
            seconds = scaling.step_time(compute, sent / (given["calibrate"]["bw_GBps"] * 1e9))
            reached.append(work / seconds / 1e12)
        return {"TF": reached, "published": reached}
    raise AssertionError(f"no formula for {name}")


def test_communication_is_exposed_where_computation_is_too_short():
    assert scaling.step_time(10, 4) == 10
    assert scaling.step_time(10, 14) == 14
    assert scaling.step_time(10, 4, overlap=0) == 14
    assert scaling.step_time(10, 8, overlap=0.5) == 13


def test_tokens_that_hide_an_all_reduce():
    # 40 % of an H100's 989.5 TFLOP/s, over an NVLink ring of 365 GB/s and InfiniBand of 40 GB/s
    assert scaling.overlap_tokens(10**6, 0.4 * 989.5e12, 365e9) == pytest.approx(1084, abs=1)
    assert scaling.overlap_tokens(10**6, 0.4 * 989.5e12, 40e9) == pytest.approx(9895, abs=1)
    tokens = scaling.overlap_tokens(8, 1e14, 1e11, grad_bytes=4)
    assert 4 * 1e9 * tokens / 1e14 == pytest.approx(ring_factor("all_reduce", 8) * 4 * 1e9 / 1e11)


def test_latency_of_many_collectives_grows_with_the_ranks():
    assert scaling.hop_latency(64, 2.5e-6, 513) == pytest.approx(64 * 2.5e-6 * 512)
    assert scaling.efficiency_with_exposed(0.3, 0.1) == pytest.approx(0.75)


def test_impossible_inputs_are_refused():
    with pytest.raises(ValueError, match="overlap=2"):
        scaling.exposed_time(1, 1, 2)
    with pytest.raises(ValueError, match="buckets=0"):
        scaling.ddp_backward_time(0, 1, 1)
    with pytest.raises(ValueError, match="flops_per_second=0"):
        scaling.days_to_train(1e9, 1e9, 8, 0)
