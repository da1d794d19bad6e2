"""The DeepSpeed config of a run, every knob that matters written out. Pure: imports neither torch nor DeepSpeed
(but for checking what a user passes through)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from harness.config import Config, ConfigError, grad_accum_steps

# DeepSpeed ignores unknown top-level keys in silence, so the ones that may be passed through are listed.
PASSTHROUGH = (
    "aio", "bf16", "checkpoint", "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_types",
    "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "gradient_allreduce_op",
    "gradient_predivide_factor", "memory_breakdown", "nebula", "prescale_gradients", "sparse_gradients",
    "steps_per_print", "tensorboard", "timers", "torch_autocast", "wall_clock_breakdown",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
# What the harness derives itself, and the key of ours that sets it.
DERIVED = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size and batch.micro_size",
    "gradient_clipping": "optimizer.clip_norm",
    "bf16.enabled": "precision",
    "fp16": "precision",
    "amp": "precision",
    "optimizer": "optimizer=adamw or sgd",
    "scheduler": "lr.schedule",
    "activation_checkpointing": "checkpointing=full or selective",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer": "zero.offload_optimizer",
    "zero_optimization.offload_param": "zero.offload_params",
}


def check_passthrough(config: Config) -> None:
    """Refuse what DeepSpeed would ignore in silence and what the harness derives.

    Raises:
        ConfigError: naming the key and, where there is one, ours to use instead.
    """
    for path, value in leaves(config.deepspeed):
        for derived, ours in DERIVED.items():
            if path == derived or path.startswith(derived + "."):
                raise ConfigError(f"deepspeed.{path}={value}: derived by the harness; set {ours} instead")
        if path.split(".")[0] not in PASSTHROUGH:
            raise ConfigError(
                f"deepspeed.{path}={value}: not a key that DeepSpeed reads; choose among {', '.join(PASSTHROUGH)}"
            )
        if value == "auto":
            raise ConfigError(f"deepspeed.{path}=auto: only Hugging Face's Trainer knows `auto`; give a value")
    if not config.deepspeed:
        return
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    for part, check in (("zero_optimization", DeepSpeedZeroConfig), ("bf16", DeepSpeedBF16Config)):
        try:
            check(**config.deepspeed.get(part, {}))
        except (ValidationError, TypeError) as error:
            problem = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
            key = ".".join([part, *map(str, problem["loc"])])
            raise ConfigError(f"deepspeed.{key}: {problem['msg']}") from error


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and leaves of a nested dict; an empty dict is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def build_ds_config(config: Config, n_params: int) -> dict[str, Any]:
    """What DeepSpeed gets.

    Args:
        config: resolved.
        n_params: parameters of the model. Buckets and thresholds that are null are fitted to it: DeepSpeed's defaults
            (5e8-element buckets, 1e5-element persistence, 1e9 live parameters) leave a small model unsharded under
            ZeRO-3 and make its higher stages use more memory than the lower.
    """
    zero, batch = config.zero, config.batch
    element_bytes = 4 if config.precision == "fp32" else 2
    reduce_bucket = zero.reduce_bucket_size or min(500_000_000, n_params)
    if config.engine.bucket_mb is not None:
        reduce_bucket = max(1, int(config.engine.bucket_mb * 2**20 / element_bytes))
    zero_optimization: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": config.engine.overlap and zero.stage > 0,
        "contiguous_gradients": zero.contiguous_gradients,
        "reduce_bucket_size": reduce_bucket,
        "allgather_bucket_size": zero.allgather_bucket_size or min(500_000_000, n_params),
        "use_multi_rank_bucket_allreduce": zero.multi_rank_allreduce,
    }
    if zero.stage == 3:
        zero_optimization |= {
            "stage3_prefetch_bucket_size": default(zero.prefetch_bucket_size, min(50_000_000, n_params // 8)),
            "stage3_param_persistence_threshold": default(
                zero.param_persistence_threshold, min(100_000, n_params // 1000)
            ),
            "stage3_max_live_parameters": default(zero.max_live_parameters, min(1_000_000_000, n_params // 2)),
            "stage3_max_reuse_distance": default(zero.max_reuse_distance, 0),
            "sub_group_size": zero.sub_group_size,
        }
    on_cpu = {"device": "cpu", "pin_memory": False}
    if zero.offload_optimizer:
        zero_optimization["offload_optimizer"] = on_cpu
    if zero.offload_params:
        zero_optimization["offload_param"] = on_cpu
    built = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": grad_accum_steps(batch),
        "gradient_clipping": config.optimizer.clip_norm,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16"},
        "zero_optimization": zero_optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "timers": {"throughput": {"enabled": False}},
    }
    return merge(built, config.deepspeed)


def default(value: int | None, fitted: int) -> int:
    return fitted if value is None else value


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the leaves of ``over`` put in."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged
