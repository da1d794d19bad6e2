"""MFU, HFU and residuals, in numbers."""

import pytest

from harness.hf_config import model_shape
from harness.machine import Machine
from harness.measure.utilisation import utilisation
from harness.residual import predicted_numbers, residuals
from tests.worlds import compose

LLAMA = ["model=llama_1b", "data.seq_len=2048", "batch.micro_size=8"]


@pytest.mark.parametrize(
    ("tokens_per_s", "checkpointing", "mfu"),
    # bf16 on 2 x H200, 8 x 2048 tokens per rank: compiled DDP, and DeepSpeed stage 3 with full checkpointing
    [(136.5e3, "none", 0.395), (74.7e3, "full", 0.217)],
)
def test_utilisation_of_measured_runs(tokens_per_s, checkpointing, mfu):
    config = compose(*LLAMA, f"checkpointing={checkpointing}", on_gpu=True)
    shape = model_shape(config.model)
    got = utilisation(config, shape, "NVIDIA H200", tokens_per_s / 2)
    assert got["mfu"] == pytest.approx(mfu, abs=1e-3)
    assert got["tflops_per_rank"] == pytest.approx(mfu * 989.5, rel=5e-3)
    if checkpointing == "none":
        assert got["hfu"] == got["mfu"]
    else:  # torch's checkpoint stops before each block's last product: more than a fifth, less than a third
        assert 1.20 < got["hfu"] / got["mfu"] < 1.30
        reentrant = compose(*LLAMA, "checkpointing=full", "checkpointing.reentrant=true", on_gpu=True)
        assert utilisation(reentrant, shape, "NVIDIA H200", tokens_per_s / 2)["hfu"] > got["hfu"]


def test_what_is_not_known_is_null_and_what_cannot_be_is_an_error():
    config = compose(*LLAMA, on_gpu=True)
    shape = model_shape(config.model)
    for device in (None, "NVIDIA H300"):
        got = utilisation(config, shape, device, 1e4)
        assert got["mfu"] is got["hfu"] is None and got["tflops_per_rank"] > 0
    assert set(utilisation(config, None, "NVIDIA H200", 1e4).values()) == {None}
    with pytest.raises(ValueError, match="MFU of 11"):
        utilisation(config, shape, "NVIDIA H200", 2e5)


def test_a_prediction_has_the_names_of_the_summary():
    config = compose(*LLAMA, "zero=stage1", "batch.global_size=16", world_size=2, on_gpu=True)
    shape = model_shape(config.model)
    numbers = predicted_numbers(config, shape, Machine.of_device("h200", "bf16"), on_gpu=True)
    assert numbers["optimizer_bytes"] == pytest.approx(6 * shape.params, rel=1e-3)
    assert numbers["peak_memory_bytes"] > 10e9
    assert numbers["tokens_per_s"] == pytest.approx(16 * 2048 / numbers["step_time_s_median"])
    assert 0.3 < numbers["mfu"] < 0.5
    unknown = predicted_numbers(config, shape, Machine(None, None), on_gpu=False)
    assert unknown["step_time_s_median"] is unknown["mfu"] is unknown["peak_memory_bytes"] is None
    assert unknown["comm_bytes_per_step"] == numbers["comm_bytes_per_step"]


def test_residuals_are_relative_and_per_operation():
    measured = {"param_bytes": 110, "mfu": None, "comm_bytes_per_step": {"all_reduce": 90, "broadcast": 7}}
    predicted = {
        "param_bytes": 100, "mfu": 0.4, "comm_bytes_per_step": {"all_reduce": 100, "all_gather": 5}, "machine": "h200",
    }  # fmt: skip
    got = residuals(measured, predicted)
    assert got["param_bytes"] == pytest.approx(0.1)
    assert got["mfu"] is None and "machine" not in got
    assert got["comm_bytes_per_step"] == {"all_reduce": pytest.approx(-0.1)}
