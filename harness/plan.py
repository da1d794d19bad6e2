"""A training run on paper: memory, traffic, time and utilisation of one rank, for any ZeRO stage and world size.

Everything here is arithmetic on a model's shape; nothing is allocated and no rank is started. The parts are
:mod:`harness.memory`, :mod:`harness.activation`, :mod:`harness.traffic`, :mod:`harness.collective`,
:mod:`harness.scaling` and :mod:`harness.measure.flops`; this module puts them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness import collective, scaling, traffic
from harness.activation import model_activation_bytes
from harness.measure import devices, flops
from harness.memory import STAGES, StateBytes, check_ranks, find_convention, model_state_bytes
from harness.shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """What every rank does in one update."""

    shape: ModelShape
    seq_len: int  # tokens
    micro_size: int  # sequences per forward pass and rank
    grad_accum_steps: int = 1
    element_bytes: int = 2  # of parameters, gradients and activations: 2 in bf16 and fp16, 4 in fp32
    checkpointing: str = "none"  # mode, every, part and reentrant as in the config group
    every: int = 2
    part: str = "block"
    reentrant: bool = False
    multi_rank_allreduce: bool = True
    overlap: bool = True  # gradients are communicated while the backward pass goes on
    bucket_elements: float = 5e8
    attention: flops.Attention = "causal"

    @property
    def tokens_per_rank(self) -> int:
        """Of one update."""
        return self.seq_len * self.micro_size * self.grad_accum_steps


@dataclass(frozen=True)
class Machine:
    """What one rank computes and communicates with."""

    flops_per_second: float  # reached in matrix products
    bandwidth: float  # bus bandwidth, bytes/s
    hop_latency: float = 0.0  # seconds
    peak_flops: float | None = None
    memory_bytes: float | None = None

    @classmethod
    def of_device(
        cls, name: str, precision: str, bandwidth: float, efficiency: float, hop_latency: float = 0.0
    ) -> Machine:
        """A known device that reaches this share of its peak.

        Raises:
            ValueError: an unknown device, or one without this precision; names the known ones.
        """
        device = devices.find_device(name)
        if device is None:
            raise ValueError(f"plan.device={name}: unknown; choose one of {', '.join(devices.device_names())}")
        peak = device.peak_flops.get(precision)
        if peak is None:
            raise ValueError(f"precision={precision}: {device.name} has only {', '.join(device.peak_flops)}")
        return cls(efficiency * peak, bandwidth, hop_latency, peak, device.memory_bytes)


@dataclass(frozen=True)
class Prediction:
    """One rank at one stage in one world. Bytes and seconds, per update."""

    stage: int
    world_size: int
    convention: str
    states: StateBytes
    activation_bytes: float
    comm_bytes_per_step: dict[str, float]  # put in, by operation
    comm_traffic_bytes: float  # sent in rings
    compute_s: float
    communication_s: float
    exposed_s: float
    tokens: int  # all ranks
    mfu: float | None
    fits: bool | None

    @property
    def memory_bytes(self) -> float:
        return self.states.total + self.activation_bytes

    @property
    def step_time_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s

    def days(self, tokens: float) -> float:
        """Days to train on so many tokens."""
        return tokens / self.tokens_per_s / scaling.SECONDS_PER_DAY


def predict(workload: Workload, machine: Machine, stage: int, world_size: int, convention: str = "paper") -> Prediction:
    """Memory, traffic and time of one rank.

    Raises:
        ValueError: an unknown stage, convention or checkpointing mode, or fewer than one rank.
    """
    check_ranks(world_size)
    states, activation = memory_of(workload, stage, world_size, convention)
    collectives = collectives_of(workload, stage)
    compute = compute_time(workload, machine)
    times = {c.purpose: communication_time(c, workload, machine, stage, world_size) for c in collectives}
    exposed = exposed_time(workload, stage, compute, times)
    tokens = workload.tokens_per_rank * world_size
    model_flops = flops.model_flops_per_token(workload.shape, workload.seq_len, workload.attention) * tokens
    needed = states.total + activation
    return Prediction(
        stage=stage,
        world_size=world_size,
        convention=find_convention(convention).name,
        states=states,
        activation_bytes=activation,
        comm_bytes_per_step=traffic.input_per_operation(collectives, world_size) if world_size > 1 else {},
        comm_traffic_bytes=traffic.sent_per_rank(collectives, world_size),
        compute_s=compute,
        communication_s=sum(times.values()),
        exposed_s=exposed,
        tokens=tokens,
        mfu=flops.mfu(model_flops, compute + exposed, machine.peak_flops, world_size),
        fits=None if machine.memory_bytes is None else needed <= machine.memory_bytes,
    )


def memory_of(workload: Workload, stage: int, world_size: int, convention: str) -> tuple[StateBytes, float]:
    """Model states and activations of one rank, bytes; activations as fused attention without dropout keeps them."""
    shape = workload.shape
    states = model_state_bytes(shape.params, stage, world_size, convention, shape.largest_layer_params)
    activation = model_activation_bytes(
        shape,
        workload.seq_len,
        workload.micro_size,
        workload.checkpointing,
        every=workload.every,
        part=workload.part,
        element_bytes=workload.element_bytes,
    )
    return states, activation


def collectives_of(workload: Workload, stage: int) -> list[traffic.Collective]:
    """What DeepSpeed communicates for this workload, bytes per update."""
    return traffic.deepspeed_collectives(
        stage,
        workload.shape.params,
        workload.grad_accum_steps,
        multi_rank_allreduce=workload.multi_rank_allreduce,
        param_bytes=workload.element_bytes,
        grad_bytes=workload.element_bytes,
    )


def hardware_flops_per_token(workload: Workload) -> float:
    """FLOPs per token of forward, recompute and backward."""
    return flops.hardware_flops_per_token(
        workload.shape,
        workload.seq_len,
        workload.checkpointing,
        every=workload.every,
        part=workload.part,
        reentrant=workload.reentrant,
        attention=workload.attention,
    )


def compute_time(workload: Workload, machine: Machine) -> float:
    """Seconds of matrix products per update, recompute included."""
    return hardware_flops_per_token(workload) * workload.tokens_per_rank / machine.flops_per_second


def communication_time(
    collective_: traffic.Collective, workload: Workload, machine: Machine, stage: int, world_size: int
) -> float:
    """Seconds of one kind of collective per update: its bytes, and a latency for each of its calls.

    Calls: one per bucket, at stage 3 at least one per block and micro step.
    """
    calls = math.ceil(collective_.payload / (workload.bucket_elements * workload.element_bytes))
    if stage == 3:
        calls = max(calls, workload.shape.layers * workload.grad_accum_steps)
    return collective.ring_time(
        collective_.operation, collective_.payload, world_size, machine.bandwidth, calls * machine.hop_latency
    )


def exposed_time(workload: Workload, stage: int, compute: float, times: dict[str, float]) -> float:
    """Seconds of communication that computation does not hide.

    Stage 3 can hide everything behind the whole computation. Before it, gradients can hide behind the backward
    pass of the micro steps that reduce them (the last one; at stage 2 each), and the gather after the step cannot.
    """
    if not workload.overlap:
        return sum(times.values())
    if stage == 3:
        return scaling.exposed_time(compute, sum(times.values()))
    forward = flops.forward_flops_per_token(workload.shape, workload.seq_len, workload.attention)
    backward = compute * (1 - forward / hardware_flops_per_token(workload))
    reducing = backward if stage == 2 else backward / workload.grad_accum_steps
    return scaling.exposed_time(reducing, times["gradients"]) + times.get("parameters", 0.0)


def largest_micro_size(
    workload: Workload, memory_bytes: float, stage: int, world_size: int, convention: str = "paper"
) -> int:
    """The largest micro batch whose memory fits; 0 if not even one sequence does."""
    states, one = memory_of(replace(workload, micro_size=1), stage, world_size, convention)
    return max(0, math.floor((memory_bytes - states.total) / one))


def cheapest_stage(workload: Workload, machine: Machine, world_size: int, convention: str = "paper") -> int | None:
    """Of the stages that fit, the one that sends least, at equal traffic the lower; ``None`` if none fits.

    Not by predicted time: how much of stage 3's traffic hides is the least certain part of the prediction.
    """
    stages = [stage for stage in STAGES if stage in find_convention(convention).stages]
    fitting = [
        p for p in (predict(workload, machine, s, world_size, convention) for s in stages) if p.fits is not False
    ]
    return min(fitting, key=lambda p: (p.comm_traffic_bytes, p.stage)).stage if fitting else None
