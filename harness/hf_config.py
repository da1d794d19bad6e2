"""The transformers config of a run's model, and the limits it sets. Imports transformers only where it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.config import Config, ConfigError, ModelConfig, one_line
from harness.shape import ModelShape, read_shape


def hf_config(model: ModelConfig) -> Any:
    """The transformers config of a model.

    Raises:
        ConfigError: unknown family or argument, or a hub name or folder that cannot be read.
    """
    from transformers import AutoConfig

    try:
        if model.path is not None:
            settings = AutoConfig.from_pretrained(
                local_or_name(model.path), trust_remote_code=model.trust_remote_code, **model.config
            )
        else:
            settings = AutoConfig.for_model(model.family or "", **model.config)
        known = {*vars(type(settings)()), *settings.attribute_map}
    except Exception as error:
        key = f"model.path={model.path}" if model.path is not None else f"model.family={model.family}"
        raise ConfigError(f"{key}: cannot be configured ({one_line(error)})") from error
    for key in model.config:
        if key not in known:
            raise ConfigError(f"model.config.{key}={model.config[key]}: {type(settings).__name__} has no such argument")
    return settings


def local_or_name(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder) if folder.exists() else path


def check_limits(config: Config) -> int:
    """The vocabulary size of a run's model, after checking that the sequences fit its positions.

    Raises:
        ConfigError: a sequence longer than the model's positions.
    """
    limits = known_limits(config.model) or vars(hf_config(config.model))
    positions = limits.get("max_position_embeddings") or limits.get("n_positions")
    if positions is not None and config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len}: longer than the {positions} positions of model={config.model.name}; "
            f"shorten it to at most {positions}"
        )
    if not isinstance(limits.get("vocab_size"), int):
        raise ConfigError(f"model={config.model.name}: its config names no vocab_size; is it a causal language model?")
    return limits["vocab_size"]


def model_shape(model: ModelConfig) -> ModelShape:
    """The sizes of a model, from its config as written where that says enough, else from transformers.

    Raises:
        ConfigError: when it cannot be configured, or is a kind of model that the formulas do not cover.
    """
    written = known_limits(model)
    try:
        return read_shape(written, written.get("model_type") or model.family)
    except ValueError:
        settings = hf_config(model).to_dict()
    try:
        return read_shape(settings, settings.get("model_type"))
    except ValueError as error:
        raise ConfigError(f"model={model.name}: {error}") from error


def known_limits(model: ModelConfig) -> dict[str, Any]:
    """The config's numbers where they stand written, without importing transformers."""
    if model.path is None:
        return model.config if "vocab_size" in model.config else {}
    try:
        written = json.loads((Path(model.path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {**written, **model.config} if "vocab_size" in written else {}
