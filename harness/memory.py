"""Bytes of model states on one rank: parameters, gradients, optimizer states, by ZeRO stage and convention.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) splits optimizer states over the ranks from stage 1,
gradients from stage 2 and parameters from stage 3. How many bytes each part takes is a convention, and the
published ones differ by two thirds: every number here names its own. GB are 10^9 bytes, GiB 2^30.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.activation import Activations

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of each part, unsharded, and what is never sharded.

    Attributes:
        stages: those that the source defines.
        stage3_grad_bytes: where stage 3 keeps fewer gradients than the stages before.
        stage3_layer_bytes: bytes per parameter of the largest layer, gathered whole at stage 3.
        buffer_bytes: by stage, fixed bytes of communication buffers with more than one rank.
    """

    name: str
    param_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    source: str
    stages: tuple[int, ...] = STAGES
    stage3_grad_bytes: float | None = None
    stage3_layer_bytes: float = 0
    buffer_bytes: dict[int, float] = field(default_factory=dict)

    @property
    def bytes_per_param(self) -> float:
        """Of one rank that shards nothing."""
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("no-master", 2, 2, 8, "16-bit weights and gradients, two fp32 moments, no fp32 master weights"),
        Convention("fp32", 4, 4, 8, "fp32 weights, gradients and two moments"),
        Convention("paper", 2, 2, 12, "ZeRO, arXiv:1910.02054, section 3.1: K = 12"),
        Convention("ultrascale", 2, 2, 12, "Ultra-Scale Playbook, memory for weights, gradients, optimizer states"),
        Convention("ultrascale-fp32-grad", 2, 6, 12, "Ultra-Scale Playbook, with fp32 gradient accumulation"),
        Convention("ml-engineering", 2, 4, 12, "ml-engineering, anatomy of a model's memory usage", stages=(0,)),
        Convention(
            "deepspeed-estimator",
            2,
            6,
            12,
            "DeepSpeed estimate_zero2/3_model_states_mem_needs: fp32 gradients beside the 16-bit ones",
            stages=(2, 3),
            stage3_grad_bytes=4,
            stage3_layer_bytes=4,
        ),
        Convention("deepspeed-autotuner", 2, 2, 16, "DeepSpeed Autotuner.get_instantiation_memory_required_per_gpu"),
        Convention(
            "eleuther",
            2,
            4,
            12,
            "EleutherAI cookbook, calc_transformer_mem.py",
            buffer_bytes={1: 1e9, 2: 1e9, 3: 3e9},
        ),
        Convention("llm-analysis", 2, 4, 12, "llm-analysis", stage3_layer_bytes=2),
        Convention("fsdp2", 4, 4, 8, "PyTorch FSDP2: fp32 shards, 16-bit gathered", stages=(3,), stage3_layer_bytes=2),
    )
}


@dataclass(frozen=True)
class Moments:
    """Bytes on a device beside parameters, optimizer states, fixed buffers and activations, at moments of an update."""

    loss: float = 0.0  # every activation is kept
    first_gradient: float = 0.0  # the same, and the buckets for gradients have been made
    first_bucket: float = 0.0  # the first bucket is full and has been reduced
    until_bucket: float = 0.0  # share of the backward pass, and so of activations, that is over by then
    last_gradient: float = 0.0  # activations are gone, but for one block's
    update: float = 0.0  # gradients and copies of them in the optimizer's step

    def most(self, activations: Activations) -> float:
        """The largest sum with activations at any of them."""
        kept, recomputed = activations.kept, activations.recomputed
        return max(
            self.loss + kept + activations.loss,
            self.first_gradient + kept + recomputed,
            self.first_bucket + kept * (1 - self.until_bucket) + recomputed,
            self.last_gradient + activations.block,
            self.update,
        )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model states on one rank, by part."""

    param: float
    grad: float  # just before an update
    optimizer: float
    buffer: float = 0.0  # gathered layers and communication buffers
    moments: Moments = field(default_factory=Moments)
    pending: float = 0.0  # gradients and weight copies that parallel=async holds back
    on_host: float = 0.0  # how much of it lies in the host's memory

    def peak(self, activations: Activations) -> float:
        """The most there is on the device at once."""
        return self.param + self.optimizer + self.pending - self.on_host + self.moments.most(activations)

    @property
    def total(self) -> float:
        return self.param + self.grad + self.optimizer + self.buffer + self.pending


def zero_bytes(
    params: float,
    stage: int,
    world_size: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> StateBytes:
    """Model states of one rank: (p + g + K) x params, with K, then g, then p divided by the ranks at stages 1, 2, 3.

    ZeRO paper, figure 1 and section 5; the defaults are its mixed-precision Adam.

    Raises:
        ValueError: no such stage, or fewer than one rank or parameter.
    """
    check_stage(stage)
    check_ranks(world_size)
    if not params > 0:
        raise ValueError(f"params={params}: must be above 0")
    return StateBytes(
        param=param_bytes * params / (world_size if stage >= 3 else 1),
        grad=grad_bytes * params / (world_size if stage >= 2 else 1),
        optimizer=optimizer_bytes * params / (world_size if stage >= 1 else 1),
    )


def model_state_bytes(
    params: float,
    stage: int,
    world_size: int,
    convention: str | Convention = "paper",
    largest_layer_params: float = 0,
) -> StateBytes:
    """Model states of one rank as a named convention counts them.

    Raises:
        ValueError: an unknown convention, or a stage that it does not define.
    """
    rules = find_convention(convention)
    if stage not in rules.stages:
        raise ValueError(f"stage={stage}: the convention {rules.name} defines only {', '.join(map(str, rules.stages))}")
    grad_bytes = rules.grad_bytes
    buffer = rules.buffer_bytes.get(stage, 0.0) if world_size > 1 else 0.0
    if stage == 3:
        grad_bytes = rules.grad_bytes if rules.stage3_grad_bytes is None else rules.stage3_grad_bytes
        buffer += rules.stage3_layer_bytes * largest_layer_params
    states = zero_bytes(params, stage, world_size, rules.param_bytes, grad_bytes, rules.optimizer_bytes)
    return StateBytes(states.param, states.grad, states.optimizer, buffer)


def unsharded_bytes(params: float, bytes_per_param: float) -> float:
    """Bytes of a model's states at so many bytes per parameter, e.g. 12, 16, 18 or 20 as the conventions disagree."""
    return params * bytes_per_param


def ipg_bucket_bytes(
    reduce_bucket_size: int, element_bytes: int, overlap_comm: bool, contiguous_gradients: bool = True
) -> int:
    """DeepSpeed's contiguous gradient buckets, alive in the backward pass of stages 1 and 2, always at stage 3.

    One of ``reduce_bucket_size`` *elements* in the gradients' type, two with ``overlap_comm``
    (deepspeed/runtime/zero/stage_1_and_2.py; measured in DeepSpeed issue #1302).
    """
    buffers = (2 if overlap_comm else 1) if contiguous_gradients else 0
    return buffers * reduce_bucket_size * element_bytes


def padded_params(params: int, world_size: int) -> int:
    """Elements of DeepSpeed's flat group of parameters: a multiple of 2 x ranks (stage_1_and_2.py, alignment)."""
    check_ranks(world_size)
    unit = 2 * world_size
    return -(-params // unit) * unit


def find_convention(convention: str | Convention) -> Convention:
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        raise ValueError(f"convention={convention}: choose one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[convention]


def check_stage(stage: int) -> None:
    if stage not in STAGES:
        raise ValueError(f"zero.stage={stage}: choose one of 0, 1, 2, 3")


def check_ranks(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1")
