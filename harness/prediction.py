"""What one rank will hold, send and take per update, for any engine, ZeRO stage and world size.

Arithmetic on a resolved config and a model's shape; nothing is allocated and no rank is started. The parts are
:mod:`harness.deepspeed_memory`, :mod:`harness.deepspeed_traffic`, :mod:`harness.baselines`,
:mod:`harness.activation`, :mod:`harness.machine`, :mod:`harness.scaling` and :mod:`harness.measure.flops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from harness import baselines, scaling, traffic
from harness.activation import Activations, Kernels, model_activations
from harness.config import AsyncConfig, CheckpointingConfig, Config, grad_accum_steps
from harness.deepspeed_memory import held_by_deepspeed
from harness.deepspeed_traffic import NORMS, counted_collectives
from harness.ds_config import build_ds_config
from harness.machine import Machine
from harness.measure import flops
from harness.memory import StateBytes, check_ranks
from harness.shape import ModelShape
from harness.staleness import expected_pending_bytes
from harness.traffic import Collective
from harness.zero3 import Recompute

KINDS = ("zero0", "zero1", "zero2", "zero3", "ddp", "fsdp")  # as rundir.job_type names them


@dataclass(frozen=True)
class Prediction:
    """One rank of one engine in one world. Bytes and seconds, per update; None where it is not known."""

    kind: str
    world_size: int
    states: StateBytes
    activations: Activations
    collectives: tuple[Collective, ...]
    compute_s: float | None
    communication_s: float | None
    exposed_s: float | None
    tokens: int  # all ranks
    model_flops: float  # all ranks
    peak_flops: float | None  # of one rank's device
    device_memory_bytes: float | None

    @property
    def memory_bytes(self) -> float:
        """The most that states, buffers and activations take at once."""
        return self.states.peak(self.activations)

    @property
    def fits(self) -> bool | None:
        return None if self.device_memory_bytes is None else self.memory_bytes <= self.device_memory_bytes

    @property
    def comm_bytes_per_step(self) -> dict[str, float]:
        """What a rank puts into each operation."""
        return traffic.input_per_operation(list(self.collectives), self.world_size)

    @property
    def norm_bytes_per_step(self) -> dict[str, float]:
        """The small part of it that does not grow with the model: norms and flags."""
        return traffic.input_per_operation(
            [each for each in self.collectives if each.purpose == NORMS], self.world_size
        )

    @property
    def comm_calls_per_step(self) -> dict[str, int]:
        """Calls of each operation."""
        calls: dict[str, int] = {}
        for each in self.collectives:
            calls[each.operation] = calls.get(each.operation, 0) + each.calls
        return calls

    @property
    def comm_traffic_bytes(self) -> float:
        """What a rank sends in rings."""
        return traffic.sent_per_rank(list(self.collectives), self.world_size)

    @property
    def step_time_s(self) -> float | None:
        return None if self.compute_s is None or self.exposed_s is None else self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks."""
        return None if self.step_time_s is None else self.tokens / self.step_time_s

    @property
    def mfu(self) -> float | None:
        if self.step_time_s is None:
            return None
        return flops.mfu(self.model_flops, self.step_time_s, self.peak_flops, self.world_size)

    def days(self, tokens: float) -> float | None:
        """Days to train on so many tokens."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s / scaling.SECONDS_PER_DAY


def predict(config: Config, shape: ModelShape, machine: Machine, kind: str, world_size: int) -> Prediction:
    """Memory, traffic and time of one rank.

    Args:
        config: resolved for this world; its engine and stage do not matter.
        kind: one of :data:`KINDS`.
    """
    check_ranks(world_size)
    states, collectives = held_and_sent(config, shape, kind, world_size)
    states = with_pending(states, config, shape, kind, world_size)
    compute = compute_time(config, shape, machine, world_size)
    times = communication_times(collectives, machine, world_size)
    assert config.batch.per_rank_size is not None
    tokens = config.batch.per_rank_size * config.data.seq_len * world_size
    return Prediction(
        kind=kind,
        world_size=world_size,
        states=states,
        activations=activations(config, shape, kind),
        collectives=tuple(collectives),
        compute_s=compute,
        communication_s=None if times is None else sum(times.values()),
        exposed_s=None if times is None or compute is None else exposed_time(config, shape, kind, compute, times),
        tokens=tokens,
        model_flops=flops.model_flops_per_token(shape, config.data.seq_len) * tokens,
        peak_flops=machine.peak_flops,
        device_memory_bytes=machine.memory_of_rank(world_size),
    )


def held_and_sent(config: Config, shape: ModelShape, kind: str, world_size: int) -> tuple[StateBytes, list[Collective]]:
    """Model states of the fullest rank, and the collectives of one update, as the engine really makes them."""
    element_bytes, accumulation = bytes_per_element(config), grad_accum_steps(config.batch)
    optimizer, momentum = config.optimizer.kind, getattr(config.optimizer, "momentum", 0) > 0
    if kind == "ddp":
        return (
            baselines.held_by_ddp(shape, element_bytes, optimizer, momentum, accumulation),
            baselines.counted_ddp(shape, config.engine.bucket_mb),
        )
    if kind == "fsdp":
        return (
            baselines.held_by_fsdp(shape, world_size, element_bytes, optimizer, momentum, accumulation),
            baselines.counted_fsdp(
                shape, world_size, element_bytes, accumulation, getattr(config.engine, "reshard", True)
            ),
        )
    stage = int(kind.removeprefix("zero"))
    at_stage = replace(config, zero=at(config.zero, stage))
    settings = build_ds_config(at_stage, shape.params)["zero_optimization"]
    states = held_by_deepspeed(shape, settings, world_size, element_bytes, accumulation, optimizer, momentum)
    recompute = recompute_of(config.checkpointing)
    return states, counted_collectives(shape, settings, world_size, element_bytes, accumulation, recompute)


def with_pending(states: StateBytes, config: Config, shape: ModelShape, kind: str, world_size: int) -> StateBytes:
    """The states with what asynchronous workers hold back, sharded as the optimizer is."""
    if not isinstance(config.parallel, AsyncConfig):
        return states
    parallel = replace(config.parallel, workers=config.parallel.workers or world_size)
    shard = shape.params if kind in ("zero0", "ddp") else math.ceil(shape.params / world_size)
    pending = sum(expected_pending_bytes(parallel, shard).values())
    on_host = parallel.pending_device == "cpu" or states.on_host > 0  # or with the optimizer
    return replace(states, pending=pending, on_host=states.on_host + pending * on_host)


def at(zero: Any, stage: int) -> Any:
    """The ZeRO settings at another stage, which may have less to offload."""
    return replace(
        zero,
        stage=stage,
        offload_optimizer=zero.offload_optimizer and stage >= 2,
        offload_params=zero.offload_params and stage == 3,
    )


def bytes_per_element(config: Config) -> int:
    """Of parameters, gradients and activations in a run's precision."""
    return 4 if config.precision == "fp32" else 2


def recompute_of(checkpointing: CheckpointingConfig) -> Recompute:
    return Recompute(checkpointing.mode, checkpointing.every, checkpointing.part, checkpointing.reentrant)


def activations(config: Config, shape: ModelShape, kind: str, mode: str | None = None) -> Activations:
    """What one micro batch takes.

    Args:
        kind: one of :data:`KINDS`.
        mode: of activation checkpointing instead of the config's.
    """
    assert config.batch.micro_size is not None
    element_bytes, compiled = bytes_per_element(config), config.model.compile
    liger = config.model.kernels == "liger"
    return model_activations(
        shape,
        config.data.seq_len,
        config.batch.micro_size,
        mode or config.checkpointing.mode,
        every=config.checkpointing.every,
        part=config.checkpointing.part,
        element_bytes=element_bytes,
        dropout=config.model.dropout > 0,
        materialised=config.model.attention == "eager",
        kernels=Kernels(
            fused_loss=liger,
            fused_blocks=liger or compiled,
            fused_last_norm=liger and not compiled,
            compiled=compiled,
            stream_bytes=4 if kind == "ddp" else None,
        ),
    )


def hardware_flops_per_token(config: Config, shape: ModelShape) -> float:
    """FLOPs per token of forward, recompute and backward, as this run's checkpointing really recomputes."""
    c = config.checkpointing
    return flops.hardware_flops_per_token(
        shape,
        config.data.seq_len,
        c.mode,
        every=c.every,
        part=c.part,
        reentrant=c.reentrant,
        dropout=config.model.dropout,
    )


def compute_time(config: Config, shape: ModelShape, machine: Machine, world_size: int) -> float | None:
    """Seconds of matrix products per update, recompute included."""
    assert config.batch.per_rank_size is not None and config.batch.micro_size is not None
    rows = config.batch.micro_size * config.data.seq_len
    size = (rows * shape.hidden_size * shape.intermediate_size) ** (1 / 3)  # of a cube with as many FLOPs
    rate = machine.rate(size, world_size)
    if rate is None:
        return None
    return hardware_flops_per_token(config, shape) * config.batch.per_rank_size * config.data.seq_len / rate


def communication_times(collectives: list[Collective], machine: Machine, world_size: int) -> dict[str, float] | None:
    """Seconds of the collectives per update by purpose; None if the machine's are not known."""
    times: dict[str, float] = {}
    for each in collectives:
        seconds = machine.seconds(each, world_size)
        if seconds is None:
            return None
        times[each.purpose] = times.get(each.purpose, 0.0) + seconds
    return times


def exposed_time(config: Config, shape: ModelShape, kind: str, compute: float, times: dict[str, float]) -> float:
    """Seconds of communication that computation does not hide.

    Stage 3 and FSDP can hide everything behind the whole computation. Before, gradients can hide behind the backward
    pass of the micro steps that reduce them (the last one; at stage 2 each), and what follows the step cannot.
    """
    hidden = times.get("gradients", 0.0)
    after_step = sum(seconds for purpose, seconds in times.items() if purpose != "gradients")
    if not config.engine.overlap or kind == "zero0":  # stage 0 reduces after the backward pass
        return hidden + after_step
    if kind in ("zero3", "fsdp"):
        kept = times.get("parameters kept whole", 0.0)
        return scaling.exposed_time(compute, sum(times.values()) - kept) + kept
    forward = flops.forward_flops_per_token(shape, config.data.seq_len)
    backward = compute * (1 - forward / hardware_flops_per_token(config, shape))
    reducing = backward if kind == "zero2" else backward / grad_accum_steps(config.batch)
    return scaling.exposed_time(reducing, hidden) + after_step
