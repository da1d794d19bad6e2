"""The shape of a decoder-only language model, read from its transformers config, and its parameter counts.

Counts are exact for the families of :data:`FAMILIES`. Another family is read by its key names as if it were
GPT-2 (when it names ``n_embd``) or Llama, which leaves out what only it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide parameters, FLOPs and activations of a causal language model."""

    hidden_size: int
    layers: int
    heads: int
    vocab_size: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    learned_positions: int = 0  # rows of a position embedding; 0: rotary or none
    tied: bool = False  # the vocabulary projection shares the token embedding's weights
    gated_mlp: bool = True  # three matrices (SwiGLU, GeGLU) instead of two
    fused_qkv: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False  # LayerNorm with bias instead of RMSNorm
    qk_norm: bool = False
    python_gelu: bool = False  # the MLP's activation function is written out in torch: gelu_new, gelu_fast

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of the keys, and again of the values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one block's attention."""
        qkv = self.query_size + 2 * self.kv_size
        weights = self.hidden_size * (qkv + self.query_size)
        return weights + self.qkv_bias * qkv + self.out_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim

    @property
    def mlp_params(self) -> int:
        """Parameters of one block's MLP."""
        into = 2 if self.gated_mlp else 1
        biases = self.mlp_bias * (into * self.intermediate_size + self.hidden_size)
        return (into + 1) * self.hidden_size * self.intermediate_size + biases

    @property
    def norm_params(self) -> int:
        """Parameters of one normalisation."""
        return (2 if self.norm_bias else 1) * self.hidden_size

    @property
    def block_params(self) -> int:
        return self.attention_params + self.mlp_params + 2 * self.norm_params

    @property
    def embedding_params(self) -> int:
        """Parameters of token and position embeddings and of an untied vocabulary projection."""
        tokens = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return tokens + self.learned_positions * self.hidden_size

    @property
    def params(self) -> int:
        """All parameters, a tied one counted once."""
        return self.embedding_params + self.layers * self.block_params + self.norm_params

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest single Linear or Embedding, which DeepSpeed's estimators call a layer."""
        qkv = self.query_size + (2 * self.kv_size if self.fused_qkv else 0)
        return max(
            self.vocab_size * self.hidden_size,
            self.learned_positions * self.hidden_size,
            self.hidden_size * qkv + self.qkv_bias * qkv,
            self.hidden_size * self.intermediate_size + self.mlp_bias * max(self.intermediate_size, self.hidden_size),
        )


@dataclass(frozen=True)
class Family:
    """What a model family fixes and its config does not say."""

    learned_positions: bool = False
    tied: bool = False
    gated_mlp: bool = True
    fused_qkv: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    python_gelu: bool = False


LLAMA = Family()
BIASED = Family(gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True)
FAMILIES = {
    "gpt2": replace(BIASED, learned_positions=True, tied=True, fused_qkv=True, python_gelu=True),
    "gpt_neox": replace(BIASED, fused_qkv=True),
    "starcoder2": replace(BIASED, tied=True),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(tied=True),
    "smollm3": Family(tied=True),
}
MIXTURE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_shape(config: Mapping[str, Any], family: str | None = None) -> ModelShape:
    """The shape in a transformers config, as a dict with GPT-2's or Llama's key names.

    Args:
        family: transformers ``model_type``; by default the config's own.

    Raises:
        ValueError: a size is missing or not a positive whole number, or the model is a mixture of experts.
    """
    config = config.get("text_config") or config
    family = family or config.get("model_type")
    if any((config.get(key) or 0) > 1 for key in MIXTURE_KEYS):
        raise ValueError(f"model_type={family}: a mixture of experts, which the formulas for dense models do not cover")
    traits = FAMILIES.get(family or "") or FAMILIES["gpt2" if "n_embd" in config else "llama"]
    hidden = size_of(config, "hidden_size", "n_embd")
    heads = size_of(config, "num_attention_heads", "n_head")
    intermediate = size_of(config, "intermediate_size", "n_inner", default=None if traits.gated_mlp else 4 * hidden)
    positions = size_of(config, "max_position_embeddings", "n_positions") if traits.learned_positions else 0
    function = config.get("activation_function", config.get("hidden_act"))
    attention_bias = config.get("attention_bias")
    all_bias = config.get("use_bias")

    def has_bias(key_value: bool | None, trait: bool) -> bool:
        return bool(next((value for value in (key_value, all_bias) if value is not None), trait))

    # Qwen2 has query, key and value biases and no key for them; Qwen3, Llama and GPT-NeoX obey attention_bias.
    fixed_bias = family in ("qwen2", "mistral", "gpt2")
    return ModelShape(
        hidden_size=hidden,
        layers=size_of(config, "num_hidden_layers", "n_layer"),
        heads=heads,
        vocab_size=size_of(config, "vocab_size"),
        kv_heads=size_of(config, "num_key_value_heads", default=heads),
        head_dim=size_of(config, "head_dim", default=hidden // heads),
        intermediate_size=intermediate,
        learned_positions=positions,
        tied=bool(config.get("tie_word_embeddings", traits.tied)),
        gated_mlp=traits.gated_mlp,
        fused_qkv=traits.fused_qkv,
        qkv_bias=traits.qkv_bias if fixed_bias else has_bias(attention_bias, traits.qkv_bias),
        out_bias=traits.out_bias if fixed_bias else has_bias(attention_bias, traits.out_bias),
        mlp_bias=has_bias(config.get("mlp_bias"), traits.mlp_bias),
        norm_bias=traits.norm_bias,
        qk_norm=traits.qk_norm,
        python_gelu=traits.python_gelu if function is None else function in ("gelu_new", "gelu_fast"),
    )


def size_of(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of ``keys`` that a config sets.

    Raises:
        ValueError: none is set and there is no default, or the value is not a positive whole number.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        if default is None:
            raise ValueError(f"model config: needs {' or '.join(keys)}")
        return default
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"model config: {key}={value} must be a whole number of at least 1")
    return value
