"""Activation memory of a transformer: what the forward pass keeps for the backward one.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4): per layer s b h (34 + 5 a s / h) bytes in 16 bit with
dropout and materialised attention. Here the same sum with the element size, dropout masks (1 byte) and
materialisation as variables. What torch and transformers really keep is :func:`model_activations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.memory import check_ranks
from harness.shape import ModelShape

FP32_BYTES = 4
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


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro batch on a device, as torch and transformers keep them."""

    kept: float  # at the end of the forward pass, without the loss
    loss: float  # more, at its most, while the loss is differentiated
    recomputed: float  # more, while the backward pass is in a block: what it recomputes and works on
    block: float  # of one block, with that

    @property
    def most(self) -> float:
        return self.kept + max(self.loss, self.recomputed)


@dataclass(frozen=True)
class Kernels:
    """What decides which tensors a model's code keeps for its backward pass.

    Attributes:
        fused_loss: the vocabulary projection and the loss are one kernel, which leaves the projection's gradient
            instead of logits.
        fused_blocks: norms and MLPs of blocks; by Liger, or by the compiler.
        fused_last_norm: the norm outside blocks.
        stream_bytes: per element of the residual stream, if not as all others: autocast leaves it in fp32.
    """

    fused_loss: bool = False
    fused_blocks: bool = False
    fused_last_norm: bool = False
    compiled: bool = False  # a block's backward pass makes both gradients of the MLP's inner features at once
    stream_bytes: int | None = None


PLAIN = Kernels()


def norm_bytes(shape: ModelShape, element_bytes: int, stream_bytes: int, fused: bool) -> int:
    """Bytes per feature that a norm keeps: input and output; an RMSNorm written out in torch, which computes in fp32,
    its input in fp32, what it normalised, and the output."""
    if fused or shape.norm_bias:
        return stream_bytes + element_bytes
    return 4 + stream_bytes + element_bytes


def attention_activation_bytes(
    shape: ModelShape, seq_len: int, element_bytes: int, materialised: bool, dropout: bool
) -> float:
    """Bytes per token of attention's queries, keys, values and output, and of its weights if they are stored."""
    weights = (2 * element_bytes + 1 if dropout else element_bytes) * shape.heads * seq_len if materialised else 0
    return element_bytes * (2 * shape.query_size + 2 * shape.kv_size) + weights


def block_activation_bytes(
    shape: ModelShape,
    seq_len: int,
    micro_size: int,
    *,
    element_bytes: int = 2,
    dropout: bool = False,
    materialised: bool = False,
    kernels: Kernels = PLAIN,
) -> float:
    """Bytes that one block keeps. For a GPT whose activation function is one kernel it is
    :func:`layer_activation_bytes`; a gated MLP keeps gate, up, their product and, unless fused, the activated gate; a
    GELU written out in torch keeps three intermediate results more."""
    if shape.gated_mlp:
        inner = 3 if kernels.fused_blocks else 4
    else:
        inner = 5 if shape.python_gelu and not kernels.fused_blocks else 2
    per_token: float = (
        2
        * shape.hidden_size
        * norm_bytes(shape, element_bytes, kernels.stream_bytes or element_bytes, kernels.fused_blocks)
    )
    per_token += attention_activation_bytes(shape, seq_len, element_bytes, materialised, dropout)
    per_token += element_bytes * inner * shape.intermediate_size + (2 * shape.hidden_size if dropout else 0)
    if shape.qk_norm:
        kept = norm_bytes(shape, element_bytes, element_bytes, kernels.fused_blocks) - element_bytes
        per_token += kept * (shape.query_size + shape.kv_size)
    return seq_len * micro_size * per_token


def model_activations(
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
    kernels: Kernels = PLAIN,
) -> Activations:
    """What one micro batch keeps, under activation checkpointing.

    A recomputed block keeps only its input. The loss holds fp32 logits three times over: themselves, their
    log-softmax's gradient and their own.

    Raises:
        ValueError: an unknown mode or part, or ``every`` below 1.
    """
    if mode not in LAYER_MODES or part not in ("block", "attention") or every < 1:
        raise ValueError(f"checkpointing: mode={mode}, part={part}, every={every} is none that can be planned")
    block = block_activation_bytes(
        shape, seq_len, micro_size, element_bytes=element_bytes, dropout=dropout, materialised=materialised,
        kernels=kernels,
    )  # fmt: skip
    tokens, stream = seq_len * micro_size, kernels.stream_bytes or element_bytes
    last = tokens * shape.hidden_size * norm_bytes(shape, element_bytes, stream, kernels.fused_last_norm)
    if kernels.fused_loss:
        last += element_bytes * shape.vocab_size * shape.hidden_size
    loss = 0 if kernels.fused_loss else 3 * FP32_BYTES * tokens * shape.vocab_size
    working = 2 * element_bytes * tokens * shape.intermediate_size if kernels.compiled else 0
    if mode == "none":
        return Activations(shape.layers * block + last, loss, working, block + working)
    if mode == "selective" and part == "attention":
        attention = tokens * attention_activation_bytes(shape, seq_len, element_bytes, materialised, dropout)
        kept = shape.layers * (block - attention)
        return Activations(kept + last, loss, attention + working, block + working)
    recomputed = shape.layers if mode == "full" else -(-shape.layers // every)
    kept = (shape.layers - recomputed) * block + recomputed * tokens * shape.hidden_size * stream
    return Activations(kept + last, loss, block + working, block + working)


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
