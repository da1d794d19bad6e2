import importlib

import pytest

from harness import estimators
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("peer"))
def test_peers_predict_what_they_print(case):
    check(peer_prediction(case["id"], case["input"]), case)


def peer_prediction(name, given):
    gib = 2**30
    if name.startswith("ds-z2"):
        need = estimators.deepspeed_zero2(
            given["total_params"], given["gpus_per_node"], given["nodes"], given["cpu_offload"]
        )
        return {"cpu": need.cpu, "gpu": need.gpu, "gpu_GiB": need.gpu / gib, "cpu_GiB": need.cpu / gib}
    if name.startswith("ds-autotuner"):
        needs = [estimators.deepspeed_autotuner(given["params"], z, given["gpus"], given["fp16"]) for z in range(4)]
        return {f"z{stage}": need for stage, need in enumerate(needs)}
    if name.startswith("ultra"):
        return {
            "GB_no_fp32_acc": estimators.ultrascale_bytes(given["params"]) / 1e9,
            "GB_fp32_acc": estimators.ultrascale_bytes(given["params"], True) / 1e9,
        }
    if name.endswith("-params"):
        return {"params": estimators.eleuther_params(given["layers"], given["hidden"])}
    if name.endswith("-flops"):
        flops = estimators.eleuther_flops(
            given["layers"], given["hidden"], given["tokens"], checkpointing=given["ckpt"]
        )
        return {"flops": flops}
    if name.startswith("eai"):
        need = estimators.eleuther_memory(
            layers=given["layers"],
            hidden_size=given["hidden"],
            heads=given["heads"],
            seq_len=given["seq"],
            vocab_size=given["vocab"],
            micro_size=given["bs"],
            stage=given["zero"],
            gpus=given["gpus"],
        )
        parts = (need.activation, need.model, need.grad, need.optimizer, need.communication, need.total)
        return dict(
            zip(("act", "model", "grad", "opt", "comm", "total_GiB"), (part / gib for part in parts), strict=True)
        )
    if name.startswith("accel"):
        mib = given["fp32_MB"]
        return {
            "train_fp32_GB": estimators.accelerate_training_bytes(mib) / 1024,
            "train_fp16_MB": estimators.accelerate_training_bytes(mib, "fp16"),
        }
    raise AssertionError(f"no estimator for {name}")


def test_deepspeed_estimates_are_those_of_the_installed_deepspeed():
    stage2 = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    stage3 = importlib.import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    params, layer = 2_851_000_123, 32_768_000
    for gpus, nodes in ((1, 1), (8, 1), (8, 4)):
        for offload in (False, True):
            ours = estimators.deepspeed_zero2(params, gpus, nodes, offload)
            assert (ours.cpu, ours.gpu) == stage2(params, gpus, nodes, offload)
            for offload_params in (False, True):
                for zero_init in (False, True):
                    given = (params, layer, gpus, nodes, offload, offload_params, zero_init)
                    need = estimators.deepspeed_zero3(*given)
                    assert (need.cpu, need.gpu) == stage3(*given)[:2]
