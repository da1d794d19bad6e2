"""What other tools predict, reproduced with their own formulas, quirks included, to print beside ours.

Only the arithmetic is theirs; each function names the code it follows. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.memory import check_ranks, check_stage


@dataclass(frozen=True)
class HostAndDevice:
    """Predicted bytes: of one node's host memory, and of one rank's device."""

    cpu: int
    gpu: int


def deepspeed_zero2(
    params: int, gpus_per_node: int = 1, nodes: int = 1, offload: bool = True, buffer_factor: float = 1.5
) -> HostAndDevice:
    """``deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs`` (since 0.14.3).

    DeepSpeed's documentation still prints the older 4P + 16P/N.
    """
    check_ranks(gpus_per_node * nodes)
    gpus = gpus_per_node * nodes
    if offload:
        return HostAndDevice(cpu=int(params * max(4 * gpus, 16) * buffer_factor), gpu=int(2 * params))
    return HostAndDevice(
        cpu=int(params * 4 * gpus_per_node * buffer_factor), gpu=int(2 * params + int(18 * params / gpus))
    )


def deepspeed_zero3(
    params: int,
    largest_layer_params: int,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload_optimizer: bool = True,
    offload_params: bool = True,
    zero_init: bool = True,
    buffer_factor: float = 1.5,
) -> HostAndDevice:
    """``deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs``.

    ``offload_params`` counts only together with ``offload_optimizer``, as there.
    """
    check_ranks(gpus_per_node * nodes)
    gpus = gpus_per_node * nodes
    layer = 4 * largest_layer_params
    if not offload_optimizer:
        held = largest_layer_params if zero_init else params
        return HostAndDevice(
            cpu=int(held * 4 * gpus_per_node * buffer_factor), gpu=int(layer + int(18 * params / gpus))
        )
    per_param = (18 if offload_params else 16) / nodes
    if not zero_init:
        per_param = max(4 * gpus_per_node, per_param)
    gpu = layer if offload_params else layer + int(2 * params / gpus)
    return HostAndDevice(cpu=int(params * per_param * buffer_factor), gpu=int(gpu))


def deepspeed_autotuner(params: float, stage: int, gpus: int, fp16: bool = True, model_parallel: int = 1) -> float:
    """``deepspeed.autotuning.Autotuner.get_instantiation_memory_required_per_gpu``.

    Args:
        fp16: whether the config enables fp16; the autotuner sizes bf16 as fp32.
    """
    check_stage(stage)
    check_ranks(gpus)
    param, grad, optimizer = (2, 2, 16) if fp16 else (4, 4, 8)
    per_param = (
        param / (gpus if stage >= 3 else 1)
        + grad / (gpus if stage >= 2 else 1)
        + optimizer / (gpus if stage >= 1 else 1)
    )
    return params * per_param / model_parallel


@dataclass(frozen=True)
class EleutherBytes:
    """One device's bytes in the parts of EleutherAI's calculator."""

    activation: float
    model: float
    grad: float
    optimizer: float
    communication: float

    @property
    def total(self) -> float:
        return self.activation + self.model + self.grad + self.optimizer + self.communication


def eleuther_params(
    layers: int,
    hidden_size: int,
    seq_len: int = 2048,
    vocab_size: int = 51200,
    kv_ratio: float = 1.0,
    expansion: float = 4,
    mlp_linears: int = 2,
    tied: bool = False,
) -> float:
    """EleutherAI cookbook, ``calc/calc_transformer_params.py``: parameters, learned positions always counted."""
    embedding = (1 if tied else 2) * vocab_size * hidden_size + seq_len * hidden_size
    norms = 8 * hidden_size * layers + 2 * hidden_size
    attention = int(2 * (1 + kv_ratio) * layers * hidden_size**2)
    return embedding + norms + attention + mlp_linears * layers * expansion * hidden_size**2


def eleuther_flops(
    layers: int,
    hidden_size: int,
    tokens: float,
    seq_len: int = 2048,
    vocab_size: int = 51200,
    checkpointing: bool = True,
    kv_ratio: float = 1.0,
    expansion: float = 4,
    mlp_linears: int = 2,
) -> float:
    """EleutherAI cookbook, ``calc/calc_transformer_flops.py``: training FLOPs, the vocabulary counted forward only."""
    passes = 4 if checkpointing else 3
    dense = 2 * (1 + 2 * kv_ratio) + 2 + 2 * mlp_linears * expansion
    blocks = passes * layers * tokens * (dense * hidden_size**2 + 4 * seq_len * hidden_size)
    return blocks + tokens * (4 * hidden_size + 2 * hidden_size * vocab_size)


def eleuther_memory(
    layers: int,
    hidden_size: int,
    heads: int,
    seq_len: int,
    vocab_size: int,
    micro_size: int,
    stage: int,
    gpus: int,
    checkpointing: bool = False,
    low_bytes: int = 2,
    grad_bytes: int = 4,
    optimizer_bytes: int = 12,
    allgather_bucket_size: float = 5e8,
    max_live_params: float = 1e9,
    kv_ratio: float = 1.0,
    expansion: float = 4,
    mlp_linears: int = 2,
) -> EleutherBytes:
    """EleutherAI cookbook, ``calc/calc_transformer_mem.py``: mixed-precision training without model parallelism."""
    check_stage(stage)
    check_ranks(gpus)
    params = eleuther_params(layers, hidden_size, seq_len, vocab_size, kv_ratio, expansion, mlp_linears)
    per_feature: float = 16 * low_bytes + 2
    if not checkpointing:
        per_feature += (2 * low_bytes + 1) * heads * seq_len / hidden_size
    buffered = 0.0
    if stage >= 1 and gpus > 1:
        buffered = allgather_bucket_size + (max_live_params if stage == 3 else 0)
    return EleutherBytes(
        activation=seq_len * micro_size * hidden_size * layers * per_feature,
        model=params * low_bytes / (gpus if stage == 3 else 1),
        grad=params * grad_bytes / (gpus if stage >= 2 else 1),
        optimizer=params * optimizer_bytes / (gpus if stage >= 1 else 1),
        communication=buffered * low_bytes,
    )


def accelerate_training_bytes(fp32_bytes: float, precision: str = "fp32") -> float:
    """``accelerate estimate-memory``'s "training using Adam": the largest of its phases, for a model of these bytes.

    fp32: weights, gradients and two moments, 4 x the model. 16-bit: the step, 2 x the fp32 model (the gradient
    phase takes 1.5 x).

    Raises:
        ValueError: another precision.
    """
    if precision == "fp32":
        return 4 * fp32_bytes
    if precision in ("fp16", "bf16"):
        return 2 * fp32_bytes
    raise ValueError(f"precision={precision}: choose one of fp32, fp16, bf16")


def ultrascale_bytes(params: float, fp32_grad_accumulation: bool = False) -> float:
    """Ultra-Scale Playbook, memory table: 16 bytes per parameter, 20 with gradients accumulated in fp32."""
    return params * (20 if fp32_grad_accumulation else 16)
