from dataclasses import replace

import pytest

from harness import activation, scaling
from harness.measure import flops
from harness.shape import read_shape
from tests.cases import cases, check

GPT = read_shape({"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 128}, "gpt2")


@pytest.mark.parametrize("case", cases("activation"))
def test_activations_are_as_published(case):
    check(derived(case["id"], case["input"]), case)


def derived(name, given):
    if name.startswith("korth-act"):
        sizes = (given["s"], given["h"], given["a"])
        return {
            "five_as_over_h": activation.attention_matrix_ratio(*sizes),
            "selective_saving": activation.selective_saving(*sizes),
            "flops_overhead": activation.selective_flops_overhead(given["s"], given["h"]),
        }
    if name.startswith("korth-layer"):

        def mib(mode="none", parallel=given["t"], **options):
            sizes = (given["s"], given["b"], given["h"], given["a"])
            return activation.layer_activation_bytes(*sizes, mode, tensor_parallel=parallel, **options) / 2**20

        return {
            "tp_none_MiB": mib(),
            "tp_sp_sel_MiB": mib("selective", sequence_parallel=True),
            "full_MiB": mib("full"),
        }
    if name.startswith("korth-overhead"):
        plain = given["fwd_ms"] + given["bwd_ms"]
        return {
            "full_pct": 100 * scaling.overhead(given["fwd_ms"] + given["full_bwd_ms"], plain),
            "selective_pct": 100 * scaling.overhead(given["fwd_ms"] + given["sel_bwd_ms"], plain),
            "sel_seq_pct": 100 * scaling.overhead(sum(given["selsp"]), plain),
        }
    if name.startswith("zero-act"):
        sizes = (given["h"], given["L"], given["s"], given["b"], given["bytes"])
        return {"GB": activation.zero_activation_bytes(*sizes, given.get("elems_per", 1)) / 1e9}
    if name.startswith("ckpt-flops"):
        shape = read_shape({"n_embd": given["h"], "n_layer": given["L"], "n_head": 6, "vocab_size": given["V"]} | GPT2)
        reentrant = given.get("reentrant", given.get("use_reentrant", True))
        model = flops.model_flops_per_token(shape, given["T"], "none")
        again = flops.recompute_flops_per_token(shape, given["T"], "full", reentrant=reentrant, attention="none")
        blocks = shape.layers * flops.block_flops_per_token(shape, given["T"], "none")
        return {"ratio": (model + again) / model, "recompute_fraction": again / blocks}
    raise AssertionError(f"no formula for {name}")


GPT2 = {"model_type": "gpt2", "n_positions": 1024}


def test_a_layer_without_parallelism_keeps_34_and_5as_over_h():
    sbh = 2048 * 4 * 12288
    assert activation.layer_activation_bytes(2048, 4, 12288, 96) == sbh * (34 + 80)
    assert activation.layer_activation_bytes(2048, 4, 12288, 96, "selective", tensor_parallel=8) == sbh * (10 + 24 / 8)
    assert activation.output_activation_bytes(2048, 4, 12288, 51200) == 4 * sbh * (1 + 51200 / 12288)


def test_a_gpt_block_keeps_what_the_layer_formula_says():
    gpt = replace(GPT, python_gelu=False)
    for options in ({"dropout": True, "materialised": True}, {"dropout": False, "materialised": False}):
        layer = activation.layer_activation_bytes(128, 2, 64, 4, element_bytes=4, **options)
        assert activation.block_activation_bytes(gpt, 128, 2, element_bytes=4, **options) == layer


def test_recomputing_more_blocks_keeps_less():
    def kept(mode, **options):
        return activation.model_activations(GPT, 128, 2, mode, **options).most

    assert kept("full") < kept("selective", every=2) < kept("none")
    assert kept("selective", every=1) == kept("full")
    assert kept("full") < kept("selective", part="attention") < kept("none")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode=some"):
        activation.layer_activation_bytes(128, 2, 64, 4, "some")
    with pytest.raises(ValueError, match="every=0"):
        activation.model_activations(GPT, 128, 2, "selective", every=0)
