"""Fused GPU kernels in place of a model's own: ``model.kernels=liger``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from harness.config import ConfigError, ModelConfig
from harness.hf_config import hf_config


def check_kernels(model: ModelConfig) -> None:
    """Refuse kernels that are not installed or do not know the model's family.

    Raises:
        ConfigError: in one line.
    """
    if model.kernels == "none":
        return
    if find_spec("liger_kernel") is None:
        raise ConfigError("model.kernels=liger: liger-kernel is not installed; pip install -e '.[gpu]'")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.family or hf_config(model).model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"model.kernels=liger: Liger has no kernels for model type {family} (model={model.name}); "
            f"use model.kernels=none"
        )


def apply_kernels(model: Any, settings: ModelConfig) -> None:
    """Put the kernels into a transformers model, weights made or not.

    Liger's loss fuses the output projection with the cross entropy and never holds all logits; it sums over tokens
    and divides by ``num_items_in_batch`` as transformers does. Under ``model.compile`` only that one is used: the
    compiler fuses the rest itself.
    """
    check_kernels(settings)
    if settings.kernels == "none":
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    inside_blocks = not settings.compile
    _apply_liger_kernel_to_instance(
        model=model, fused_linear_cross_entropy=True, rope=inside_blocks, rms_norm=inside_blocks,
        swiglu=inside_blocks, geglu=inside_blocks, layer_norm=inside_blocks,
    )  # fmt: skip
