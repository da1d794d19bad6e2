"""What a run should have measured, beside what it did."""

from __future__ import annotations

from typing import Any

from harness.config import Config
from harness.machine import Machine
from harness.prediction import predict
from harness.rundir import job_type
from harness.shape import ModelShape


def predicted_numbers(config: Config, shape: ModelShape, machine: Machine, on_gpu: bool) -> dict[str, Any]:
    """The prediction of a run under the names of its summary; None where nothing is known.

    Args:
        config: resolved.
        on_gpu: the peak of a GPU's memory is predicted, that of a process on the host is not.
    """
    world_size = config.launch.world_size
    assert world_size is not None
    prediction = predict(config, shape, machine, job_type(config), world_size)
    return {
        "param_bytes": prediction.states.param,
        "grad_bytes": prediction.states.grad,
        "optimizer_bytes": prediction.states.optimizer,
        "pending_gradient_bytes": prediction.states.pending or None,
        "peak_memory_bytes": prediction.memory_bytes if on_gpu else None,
        "comm_bytes_per_step": prediction.comm_bytes_per_step,
        "norm_bytes_per_step": prediction.norm_bytes_per_step,  # the part of it that is norms and flags
        "comm_calls_per_step": prediction.comm_calls_per_step,
        "comm_traffic_bytes": prediction.comm_traffic_bytes,
        "step_time_s_median": prediction.step_time_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "machine": machine.name,
    }


def residuals(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Measured / predicted - 1 per key that is in both; per operation where there are several; None without a number."""
    found: dict[str, Any] = {}
    for key, expected in predicted.items():
        value = measured.get(key)
        if isinstance(expected, dict) and isinstance(value, dict):
            found[key] = residuals(value, expected)
        elif key in measured and not isinstance(expected, str | dict):
            found[key] = value / expected - 1 if expected and value is not None else None
    return found
