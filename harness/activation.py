"""Activation memory of a transformer: what the forward pass keeps for the backward one.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4): per layer s b h (34 + 5 a s / h) bytes in 16 bit with
dropout and materialised attention. Here the same sum with the element size, dropout masks (1 byte) and
materialisation as variables; what a framework really keeps differs by a constant, which a measurement has to fit.
"""

from __future__ import annotations

from harness.memory import check_ranks
from harness.shape import ModelShape

LAYER_MODES = ("none", "selective", "full")


def attention_matrix_ratio(seq_len: int, hidden_size: int, heads: int) -> float:
    """5 a s / h: bytes of a layer's attention matrices per s b h (16 bit, with dropout)."""
    return 5 * heads * seq_len / hidden_size


def layer_activation_bytes(
    seq_len: int,
    micro_size: int,
    hidden_size: int,
    heads: int,
    mode: str = "none",
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
    dropout: bool = True,
    materialised: bool = True,
) -> float:
    """Bytes that one GPT layer keeps on one device (Korthikanti 2022, table 2).

    Args:
        mode: ``none``; ``selective``: scores and weighted values recomputed; ``full``: only the layer's input kept.
        sequence_parallel: also split over the tensor-parallel ranks what tensor parallelism leaves whole.
        dropout: keeps three masks of a byte per element and the dropped-out attention weights.
        materialised: attention weights are stored; false for fused kernels, which store none.

    Raises:
        ValueError: an unknown mode, or sizes below 1.
    """
    check_ranks(tensor_parallel)
    if min(seq_len, micro_size, hidden_size, heads, element_bytes) < 1:
        raise ValueError(f"a layer of {seq_len} x {micro_size} x {hidden_size} with {heads} heads keeps nothing")
    features = seq_len * micro_size * hidden_size
    if mode == "full":
        return element_bytes * features
    if mode not in LAYER_MODES:
        raise ValueError(f"mode={mode}: choose one of {', '.join(LAYER_MODES)}")
    whole: float = 4 * element_bytes + (2 if dropout else 0)  # norms, inputs of attention and MLP, two masks
    split = 12 * element_bytes  # queries, keys, values, attention's output, the MLP's 4 h twice
    if sequence_parallel:
        whole /= tensor_parallel
    per_feature = whole + split / tensor_parallel
    if mode == "none" and materialised:
        per_weight = 2 * element_bytes + 1 if dropout else element_bytes
        per_feature += per_weight * heads * seq_len / hidden_size / tensor_parallel
    return features * per_feature


def selective_saving(seq_len: int, hidden_size: int, heads: int) -> float:
    """Share of a layer's activation memory that selective recomputation saves (Korthikanti 2022, section 5)."""
    matrices = attention_matrix_ratio(seq_len, hidden_size, heads)
    return matrices / (34 + matrices)


def selective_flops_overhead(seq_len: int, hidden_size: int) -> float:
    """FLOPs that selective recomputation adds, as a share of the model's, without vocabulary: (s/6h) / (1 + s/6h).

    As published (Korthikanti 2022, section 5: 2.7 % for GPT-3), three times one more forward pass of the attention
    core; see :func:`harness.measure.flops.korthikanti_flops_per_token`.
    """
    ratio = seq_len / (6 * hidden_size)
    return ratio / (1 + ratio)


def output_activation_bytes(
    seq_len: int, micro_size: int, hidden_size: int, vocab_size: int, element_bytes: int = 2, logit_bytes: int = 4
) -> float:
    """Bytes around the vocabulary projection: inputs of last norm and projection, and logits, 4 s b h (1 + v/h).

    Korthikanti 2022, section 4.3, with fp32 logits; the largest part of a small model.
    """
    return seq_len * micro_size * (2 * element_bytes * hidden_size + logit_bytes * vocab_size)


def block_activation_bytes(
    shape: ModelShape,
    seq_len: int,
    micro_size: int,
    *,
    element_bytes: int = 2,
    dropout: bool = False,
    materialised: bool = False,
) -> float:
    """Bytes that one block of any shape keeps: grouped queries keep fewer keys, a gated MLP four inner tensors.

    For a GPT it is :func:`layer_activation_bytes`.
    """
    inner = (4 if shape.gated_mlp else 2) * shape.intermediate_size
    elements = 4 * shape.hidden_size + 2 * shape.query_size + 2 * shape.kv_size + inner
    per_token = element_bytes * elements + (2 * shape.hidden_size if dropout else 0)
    if materialised:
        per_token += (2 * element_bytes + 1 if dropout else element_bytes) * shape.heads * seq_len
    return seq_len * micro_size * per_token


def model_activation_bytes(
    shape: ModelShape,
    seq_len: int,
    micro_size: int,
    mode: str = "none",
    *,
    every: int = 2,
    part: str = "block",
    element_bytes: int = 2,
    dropout: bool = False,
    materialised: bool = False,
) -> float:
    """Bytes at the end of the forward pass of one micro batch, logits included, under activation checkpointing.

    A recomputed block keeps only its input; while the backward pass is in it, its own tensors are there again, so
    one whole block is added. Recomputed attention keeps its input and output.

    Raises:
        ValueError: an unknown mode or part, or ``every`` below 1.
    """
    kept = block_activation_bytes(
        shape, seq_len, micro_size, element_bytes=element_bytes, dropout=dropout, materialised=materialised
    )
    output = output_activation_bytes(seq_len, micro_size, shape.hidden_size, shape.vocab_size, element_bytes)
    if mode == "none":
        return shape.layers * kept + output
    if mode not in LAYER_MODES or part not in ("block", "attention") or every < 1:
        raise ValueError(f"checkpointing: mode={mode}, part={part}, every={every} is none that can be planned")
    tokens = seq_len * micro_size
    if mode == "selective" and part == "attention":
        attention = element_bytes * (2 * shape.query_size + 2 * shape.kv_size)
        if materialised:
            attention += (2 * element_bytes + 1 if dropout else element_bytes) * shape.heads * seq_len
        return shape.layers * (kept - tokens * attention) + tokens * attention + output
    recomputed = shape.layers if mode == "full" else -(-shape.layers // every)
    return (shape.layers - recomputed) * kept + recomputed * tokens * shape.hidden_size * element_bytes + kept + output


def zero_activation_bytes(
    hidden_size: int,
    layers: int,
    seq_len: int,
    batch_size: int,
    element_bytes: int = 2,
    elements_per_feature: float = 12,
) -> float:
    """The ZeRO paper's estimate (arXiv:1910.02054, section 3.2, footnote): 12 x hidden x batch x seq x layers elements.

    With ``elements_per_feature=1`` the checkpoints of full recomputation, one per layer.
    """
    return elements_per_feature * hidden_size * batch_size * seq_len * layers * element_bytes
