"""Floating-point operations of training a causal language model, and the share of the hardware's peak they reach.

A product of (m, k) and (k, n) is 2mkn FLOPs; nothing but matrix products counts. Model FLOPs are what the model
needs, forward once and backward twice that; hardware FLOPs add what activation checkpointing computes again
(PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Korthikanti et al. 2022, arXiv:2205.05198, appendix A).

Attention conventions: ``causal`` counts half of the sequence x sequence products, the half a causal mask keeps
(what FlashAttention computes); ``full`` counts them whole (PaLM, Megatron, llm-foundry, most published MFU);
``none`` leaves them out.
"""

from __future__ import annotations

import math
from typing import Literal

from harness.shape import ModelShape

Attention = Literal["causal", "full", "none"]
ATTENTION_SHARE = {"causal": 0.5, "full": 1.0, "none": 0.0}


def attention_core_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """Forward FLOPs per token of one block's scores and weighted values, 4 x seq_len x query features if full.

    Grouped queries change nothing here: every query head meets the whole sequence.

    Raises:
        ValueError: an unknown convention.
    """
    if attention not in ATTENTION_SHARE:
        raise ValueError(f"attention={attention}: choose one of {', '.join(ATTENTION_SHARE)}")
    return 4 * seq_len * shape.query_size * ATTENTION_SHARE[attention]


def attention_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """Forward FLOPs per token of one block's attention: projections in, core, projection out."""
    projections = 2 * shape.hidden_size * (2 * shape.query_size + 2 * shape.kv_size)
    return projections + attention_core_flops_per_token(shape, seq_len, attention)


def mlp_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs per token of one block's MLP, of two matrices or, gated, three."""
    return 2 * shape.hidden_size * shape.intermediate_size * (3 if shape.gated_mlp else 2)


def block_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """Forward FLOPs per token of one block."""
    return attention_flops_per_token(shape, seq_len, attention) + mlp_flops_per_token(shape)


def forward_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """Forward FLOPs per token of the model: its blocks and the vocabulary projection (embedding look-ups are free)."""
    vocabulary = 2 * shape.hidden_size * shape.vocab_size
    return shape.layers * block_flops_per_token(shape, seq_len, attention) + vocabulary


def backward_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """Backward FLOPs per token without recompute: for each product one for its input and one for its weight."""
    return 2 * forward_flops_per_token(shape, seq_len, attention)


def model_flops_per_token(shape: ModelShape, seq_len: int, attention: Attention = "causal") -> float:
    """FLOPs per token of forward and backward, without recompute; the numerator of MFU.

    With ``attention="full"`` and a GPT this is 72 L h^2 (1 + s/6h + V/12hL) (Korthikanti 2022, equation 7).
    """
    return 3 * forward_flops_per_token(shape, seq_len, attention)


def recompute_flops_per_token(
    shape: ModelShape,
    seq_len: int,
    mode: str,
    *,
    every: int = 2,
    part: str = "block",
    reentrant: bool = False,
    dropout: float = 0.0,
    attention: Attention = "causal",
) -> float:
    """FLOPs per token that activation checkpointing computes a second time in the backward pass.

    Args:
        mode: ``none``; ``full``: every block; ``selective``: see ``part``.
        every: with ``part="block"``, blocks 0, every, 2 x every, ... are recomputed.
        part: ``block``; ``attention``: every block's attention with its projections; ``core``: every block's
            scores and weighted values only (Korthikanti 2022, section 5).
        reentrant: torch's reentrant checkpoint runs the whole forward again. The other stops as soon as the last
            tensor that the backward pass needs is there, and so skips the last product of a block.
        dropout: probability behind that last product; above 0 its mask is needed and nothing is skipped.

    Raises:
        ValueError: an unknown mode or part, or ``every`` below 1.
    """
    if mode == "none":
        return 0.0
    if mode not in ("full", "selective"):
        raise ValueError(f"checkpointing.mode={mode}: choose one of none, full, selective")
    if every < 1:
        raise ValueError(f"checkpointing.every={every}: must be at least 1")
    if mode == "full":
        every, part = 1, "block"
    skips_last = not reentrant and dropout == 0
    if part == "block":
        last = 2 * shape.hidden_size * shape.intermediate_size
        unit, count = block_flops_per_token(shape, seq_len, attention), math.ceil(shape.layers / every)
    elif part == "attention":
        last = 2 * shape.hidden_size * shape.query_size
        unit, count = attention_flops_per_token(shape, seq_len, attention), shape.layers
    elif part == "core":
        last = 0
        unit, count = attention_core_flops_per_token(shape, seq_len, attention), shape.layers
    else:
        raise ValueError(f"checkpointing.part={part}: choose one of block, attention, core")
    return count * (unit - (last if skips_last else 0))


def hardware_flops_per_token(
    shape: ModelShape,
    seq_len: int,
    mode: str = "none",
    *,
    every: int = 2,
    part: str = "block",
    reentrant: bool = False,
    dropout: float = 0.0,
    attention: Attention = "causal",
    fused_attention: bool = False,
) -> float:
    """FLOPs per token that the hardware really computes: :func:`model_flops_per_token` and recompute.

    Args:
        fused_attention: also count the scores that a fused attention kernel computes again in its backward pass
            (FlashAttention, Dao et al. 2022, arXiv:2205.14135, algorithm 4): 5 products backward instead of 4.
            Published HFU mostly leaves them out, hence the default.
    """
    flops = model_flops_per_token(shape, seq_len, attention) + recompute_flops_per_token(
        shape,
        seq_len,
        mode,
        every=every,
        part=part,
        reentrant=reentrant,
        dropout=dropout,
        attention=attention,
    )
    if fused_attention:
        flops += shape.layers * attention_core_flops_per_token(shape, seq_len, attention) / 2
    return flops


def palm_flops_per_token(params: int, layers: int, hidden_size: int, seq_len: int) -> float:
    """6 N + 12 L h s, FLOPs per token by the parameter count alone (PaLM appendix B; llm-foundry, torchtitan).

    Args:
        params: those that take part in products; llm-foundry counts all, torchtitan leaves out the token embedding.
    """
    return 6 * params + 12 * layers * hidden_size * seq_len


def korthikanti_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """72 L h^2 (1 + s/3h + V/12hL) for a GPT: hardware FLOPs with selective recompute as published.

    Korthikanti 2022, equation 8, behind the HFU of its table 5. It adds 12 L h s to the model FLOPs, three times
    what computing scores and weighted values once more takes: :func:`hardware_flops_per_token` with
    ``mode="selective", part="core"`` counts that.
    """
    core = shape.layers * attention_core_flops_per_token(shape, seq_len, "full")
    return model_flops_per_token(shape, seq_len, "full") + 3 * core


def mfu(model_flops: float, seconds: float, peak_flops: float | None, ranks: int = 1) -> float | None:
    """Model FLOPs utilisation, between 0 and 1; ``None`` where the peak is unknown.

    Args:
        model_flops: of the work that all ranks did in ``seconds``, without recompute.
        peak_flops: FLOP/s of one rank's device, dense, in the precision of the products.

    Raises:
        ValueError: above 1, which no hardware reaches, or a negative or non-finite input.
    """
    return utilisation("MFU", model_flops, seconds, peak_flops, ranks)


def hfu(hardware_flops: float, seconds: float, peak_flops: float | None, ranks: int = 1) -> float | None:
    """Hardware FLOPs utilisation: as :func:`mfu`, with the recompute counted."""
    return utilisation("HFU", hardware_flops, seconds, peak_flops, ranks)


def utilisation(name: str, flops: float, seconds: float, peak_flops: float | None, ranks: int) -> float | None:
    if peak_flops is None:
        return None
    if not (math.isfinite(flops) and flops >= 0 and seconds > 0 and math.isfinite(peak_flops) and peak_flops > 0):
        raise ValueError(f"{name}: {flops} FLOPs in {seconds} s of a peak of {peak_flops} FLOP/s is no utilisation")
    if ranks < 1:
        raise ValueError(f"{name}: {ranks} ranks; must be at least 1")
    share = flops / (seconds * peak_flops * ranks)
    if share > 1:
        raise ValueError(
            f"{name} of {share:.1%}: {flops / seconds / ranks / 1e12:.1f} TFLOP/s per rank is above the device's peak "
            f"of {peak_flops / 1e12:.1f}; check the time, the FLOPs and the peak"
        )
    return share
