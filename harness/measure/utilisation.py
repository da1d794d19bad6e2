"""How much of the hardware's peak a run used: MFU, HFU and FLOP/s per rank."""

from __future__ import annotations

from harness.config import Config
from harness.measure import devices, flops
from harness.prediction import hardware_flops_per_token
from harness.shape import ModelShape


def utilisation(
    config: Config, shape: ModelShape | None, device: str | None, tokens_per_s_per_rank: float
) -> dict[str, float | None]:
    """``mfu`` and ``hfu`` between 0 and 1, and ``tflops_per_rank``, model TFLOP/s.

    MFU counts forward and twice as much backward, HFU also what this run's checkpointing recomputes; of attention the
    half that a causal mask keeps (:mod:`harness.measure.flops`).

    Args:
        config: resolved.
        shape: None if the model's FLOPs are not known; then nothing is.
        device: the GPU's name; None on a CPU, whose peak is not known.

    Raises:
        ValueError: above 1, which no hardware reaches.
    """
    if shape is None:
        return {"mfu": None, "hfu": None, "tflops_per_rank": None}
    model = flops.model_flops_per_token(shape, config.data.seq_len) * tokens_per_s_per_rank
    hardware = hardware_flops_per_token(config, shape) * tokens_per_s_per_rank
    peak = devices.peak_flops(device, config.precision) if device is not None else None
    return {
        "mfu": flops.mfu(model, 1.0, peak),
        "hfu": flops.hfu(hardware, 1.0, peak),
        "tflops_per_rank": model / 1e12,
    }
