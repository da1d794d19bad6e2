"""A plan's rows: one prediction per engine, stage and world size, and what can be chosen from them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

from harness.config import BatchConfig, Config, ConfigError, resolve_batch
from harness.machine import Machine
from harness.prediction import KINDS, Prediction, activations, predict
from harness.shape import ModelShape


@dataclass(frozen=True)
class Row:
    """One engine in one world."""

    prediction: Prediction
    batch: BatchConfig
    assumed: str  # how the batch differs from what was asked for; empty if it does not
    largest_micro_size: int | None  # sequences; None if the device's memory is not known, 0 if not one fits


@dataclass(frozen=True)
class WorldPlan:
    """Every engine in one world."""

    world_size: int
    rows: tuple[Row, ...]

    @property
    def assumed(self) -> str:
        return self.rows[0].assumed

    @property
    def cheapest(self) -> str | None:
        """Of the ZeRO stages that fit the one that sends least, at equal traffic the lower; None if none fits.

        Not by predicted time: how much of stage 3's traffic hides is the least certain part of a prediction.
        """
        stages = [row.prediction for row in self.rows if row.prediction.kind.startswith("zero")]
        fitting = [each for each in stages if each.fits is not False]
        return min(fitting, key=lambda each: (each.comm_traffic_bytes, each.kind)).kind if fitting else None


def plan_world(config: Config, shape: ModelShape, machine: Machine, world_size: int) -> WorldPlan:
    """Rows for every engine in one world.

    Args:
        config: as composed, its precision resolved; the batch need not divide.
    """
    batch, assumed = batch_of(config.batch, world_size)
    config = replace(config, batch=batch)
    rows = []
    for kind in KINDS:
        prediction = predict(config, shape, machine, kind, world_size)
        rows.append(Row(prediction, batch, assumed, largest_micro_size(config, shape, prediction)))
    return WorldPlan(world_size, tuple(rows))


def batch_of(batch: BatchConfig, world_size: int) -> tuple[BatchConfig, str]:
    """The batch of one world, and in words what had to be assumed where the one asked for does not divide."""
    try:
        return resolve_batch(batch, world_size), ""
    except ConfigError:
        size = batch.global_size if batch.kind == "strong" else batch.per_rank_size
        if size is None:
            raise
        micro = batch.micro_size or 1
        assumed = replace(batch, global_size=micro * world_size, per_rank_size=micro, micro_size=micro)
        key = "global_size" if batch.kind == "strong" else "per_rank_size"
        return assumed, (
            f"batch.{key}={size} does not divide over {world_size} ranks: "
            f"assumes {micro} per rank and no accumulation, {micro * world_size} in all"
        )


def largest_micro_size(config: Config, shape: ModelShape, prediction: Prediction) -> int | None:
    """The largest micro batch whose memory fits beside the states, in sequences."""
    memory = prediction.device_memory_bytes
    if memory is None:
        return None

    def needed(micro_size: int) -> float:
        batch = replace(config.batch, micro_size=micro_size)
        return prediction.states.peak(activations(replace(config, batch=batch), shape, prediction.kind))

    return bisect.bisect_right(range(1, 2**20), memory, key=needed)
