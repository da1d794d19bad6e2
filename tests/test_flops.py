import warnings

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from harness.config import CheckpointingConfig, Config, ModelConfig
from harness.measure import flops
from harness.model import build_model
from harness.scaling import throughput_increase
from harness.shape import read_shape
from tests.cases import cases, check
from tests.models import CONF

SEQUENCES, SEQ_LEN = 2, 32


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", cases("mfu"))
def test_utilisation_is_as_published(case):
    check(derived(case["id"], case["input"]), case)


def derived(name, given):
    if name.startswith("korth"):
        sizes = {"n_embd": given["h"], "n_layer": given["L"], "n_head": 1, "vocab_size": given["v"]}
        shape = read_shape(sizes | {"n_positions": given["s"]}, "gpt2")
        tokens = given["B"] * given["s"]
        model = flops.model_flops_per_token(shape, given["s"], "full") * tokens
        closed = 72 * given["L"] * given["h"] ** 2
        closed *= 1 + given["s"] / (6 * given["h"]) + given["v"] / (12 * given["h"] * given["L"])
        assert model == pytest.approx(tokens * closed)
        hardware = flops.korthikanti_flops_per_token(shape, given["s"]) * tokens
        once = flops.recompute_flops_per_token(shape, given["s"], "selective", part="core", attention="full")
        assert hardware - model == pytest.approx(3 * once * tokens)
        time = (given["iter_s"], given["peak"], given["gpus"])
        before = {1.1: 1.42, 13.75: 18.13}[given["iter_s"]]  # s, full recomputation, same table
        return {
            "mfu_pct": 100 * flops.mfu(model, *time),
            "hfu_pct": 100 * flops.hfu(hardware, *time),
            "thr_increase_pct": 100 * throughput_increase(before, given["iter_s"]),
        }
    params = given["params"] - (given["vocab"] * given["d"] if given.get("exclude_embedding") else 0)
    per_token = flops.palm_flops_per_token(params, given["L"], given["d"], given["s"])
    return {"mfu_pct": 100 * flops.mfu(per_token * given["tok_s_gpu"], 1, given["peak"])}


def tiny(name, attention, checkpointing):
    option = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    settings = ModelConfig(name=name, family=option["family"], config=option["config"], attention=attention)
    config = Config(model=settings, checkpointing=checkpointing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model(config, torch.float32)
    return model, read_shape(option["config"], option["family"])


def counted(model, backward):
    ids = torch.randint(0, 256, (SEQUENCES, SEQ_LEN))
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, ids, torch.tensor(SEQUENCES * (SEQ_LEN - 1)))
        if backward:
            loss.backward()
    return counter.get_total_flops() / (SEQUENCES * SEQ_LEN)


MODES = {
    "none": {"mode": "none"},
    "full-reentrant": {"mode": "full", "reentrant": True},
    "full-early-stop": {"mode": "full"},
    "every-3": {"mode": "selective", "every": 3},
    "attention": {"mode": "selective", "part": "attention"},
    "attention-reentrant": {"mode": "selective", "part": "attention", "reentrant": True},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in ("gpt2_tiny", "llama_tiny") for mode in MODES if mode != "attention-reentrant"]
    + [("gpt2_tiny", "attention-reentrant")],  # Llama's attention takes its input by keyword, which torch refuses
)
def test_flops_are_those_that_torch_counts(name, mode):
    # eager attention is counted whole; torch does not count the fused kernel on the CPU
    for attention, convention in (("eager", "full"), ("sdpa", "none")):
        model, shape = tiny(name, attention, CheckpointingConfig(**MODES[mode]))
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.params
        forward = flops.forward_flops_per_token(shape, SEQ_LEN, convention)
        assert counted(model, backward=False) == pytest.approx(forward, rel=0.01)
        both = flops.hardware_flops_per_token(shape, SEQ_LEN, attention=convention, **MODES[mode])
        assert counted(model, backward=True) == pytest.approx(both, rel=0.01)


def test_a_causal_mask_halves_the_products_of_sequences_and_nothing_else():
    _, shape = tiny("llama_tiny", "sdpa", CheckpointingConfig(mode="none"))
    none, causal, full = (flops.model_flops_per_token(shape, SEQ_LEN, a) for a in ("none", "causal", "full"))
    assert causal - none == full - causal == 3 * 4 * 2 * SEQ_LEN * 128
    assert flops.backward_flops_per_token(shape, SEQ_LEN) == 2 * flops.forward_flops_per_token(shape, SEQ_LEN)
    fused = flops.hardware_flops_per_token(shape, SEQ_LEN, attention="full", fused_attention=True)
    assert fused - full == 4 * 2 * SEQ_LEN * 128


def test_dropout_behind_the_last_product_leaves_nothing_to_skip():
    _, shape = tiny("gpt2_tiny", "sdpa", CheckpointingConfig(mode="none"))
    again = [
        flops.recompute_flops_per_token(shape, SEQ_LEN, "full", **o) for o in ({"dropout": 0.1}, {"reentrant": True})
    ]
    assert again[0] == again[1] > flops.recompute_flops_per_token(shape, SEQ_LEN, "full")


def test_utilisation_above_the_peak_is_an_error_and_unknown_hardware_none():
    assert flops.mfu(5e14, 1, 1e15) == 0.5
    assert flops.mfu(5e14, 1, 1e15, ranks=2) == 0.25
    assert flops.mfu(5e14, 1, None) is None and flops.hfu(5e14, 1, None) is None
    for utilisation, name in ((flops.mfu, "MFU"), (flops.hfu, "HFU")):
        with pytest.raises(ValueError, match=f"{name} of 120.0%"):
            utilisation(1.2e15, 1, 1e15)
        with pytest.raises(ValueError, match="no utilisation"):
            utilisation(1e15, 0, 1e15)
        with pytest.raises(ValueError, match="no utilisation"):
            utilisation(float("nan"), 1, 1e15)


@pytest.mark.parametrize(
    "options", [{"mode": "half"}, {"mode": "selective", "part": "mlp"}, {"mode": "full", "every": 0}]
)
def test_unknown_checkpointing_is_refused(options):
    _, shape = tiny("gpt2_tiny", "sdpa", CheckpointingConfig(mode="none"))
    with pytest.raises(ValueError, match=r"checkpointing\."):
        flops.recompute_flops_per_token(shape, SEQ_LEN, **options)


def test_an_unknown_attention_convention_is_refused():
    _, shape = tiny("gpt2_tiny", "sdpa", CheckpointingConfig(mode="none"))
    with pytest.raises(ValueError, match="attention=half"):
        flops.model_flops_per_token(shape, SEQ_LEN, "half")
