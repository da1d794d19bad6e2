"""The parameter server of a run: which gradients reach the weights at each engine update, and at which rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.config import AsyncConfig, Config, total_steps
from harness.delayed import DelayedOptimizer, check_pending_memory
from harness.lr import rate_at
from harness.measure.memory import free_memory_bytes
from harness.ranks import World
from harness.staleness import Arrival, Schedule, WeightUpdate, build_schedule, rate_factor

if TYPE_CHECKING:
    from harness.engines import Engine


def scheduled_rate(config: Config, applied: int) -> float:
    """The rate, before any remedy, of a weight update after `applied` gradients; it follows the applied samples."""
    size = config.batch.global_size
    assert size is not None
    return rate_at(config.lr, applied * size, size, total_steps(config) * size)


def hold_back(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.Optimizer:
    """The optimizer an engine gets: under ``parallel=async`` one that applies gradients when they have arrived."""
    if not isinstance(config.parallel, AsyncConfig):
        return optimizer
    assert config.batch.global_size is not None
    schedule = build_schedule(config.parallel, config.batch.global_size, config.seed)
    return DelayedOptimizer(optimizer, schedule, config.parallel, lambda update: scheduled_rate(config, update.applied))


class Server:
    """Told of each engine update before and after; keeps the simulated clock and the count of gradients.

    Synchronously each engine update applies its own gradient. Asynchronously the engine's optimizer is a
    :class:`DelayedOptimizer`, which sets the rate of each weight update itself: there may be several, or none.

    Raises:
        ConfigError: when the pending gradients would not fit into memory.
    """

    def __init__(self, config: Config, world: World, engine: Engine):
        assert config.batch.global_size is not None and config.parallel.workers is not None
        self.config = config
        self.batch_size = config.batch.global_size
        self.delayed = engine.optimizer if isinstance(engine.optimizer, DelayedOptimizer) else None
        if self.delayed is None:
            self.schedule: Schedule = build_schedule(config.parallel, config.batch.global_size, config.seed)
        else:
            self.schedule = self.delayed.schedule
            on_cpu = self.delayed.settings.pending_device == "cpu" or config.zero.offload_optimizer
            free = free_memory_bytes(torch.device("cpu") if on_cpu else world.device)
            ranks_that_share = world.size if engine.sharded else 1
            check_pending_memory(self.delayed.settings, engine.n_params // ranks_that_share, free)
        self._arrivals: tuple[Arrival, ...] = ()

    def begin_update(self, last: bool) -> float:
        """Fix what the coming engine update applies; the scheduled rate.

        Args:
            last: it is the run's last, in which the pending gradients are drained.
        """
        rate = scheduled_rate(self.config, self.schedule.tally.applied)
        begin_update = self.delayed.begin_update if self.delayed else self.schedule.advance
        self._arrivals = begin_update(last)
        return rate

    def end_update(self) -> dict[str, Any]:
        """Columns of the row of metrics: what the engine update applied, and what has been applied so far.

        ``lr`` is the effective rate of its last weight update, null without one.
        """
        arrivals = self._arrivals if self.delayed is None else self.delayed.end_update()
        updates = [arrival.update for arrival in arrivals if arrival.update is not None]
        staleness = [each for update in updates for each in update.staleness]
        tally = self.schedule.tally
        return {
            "lr": self.effective_rate(updates[-1]) if updates else None,
            "updates": tally.updates,
            "applied_samples": tally.applied * self.batch_size,
            "staleness": staleness,
            "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
            "sim_time_s": tally.now_s,
        }

    def effective_rate(self, update: WeightUpdate) -> float:
        """The scheduled rate as remedies have changed it."""
        rate, settings = scheduled_rate(self.config, update.applied), self.config.parallel
        if not isinstance(settings, AsyncConfig):
            return rate
        return rate * rate_factor(update, settings.remedy, settings.lr_mode)

    @property
    def pending_gradient_bytes(self) -> int:
        """The most bytes this rank ever held for pending gradients and, under DC-ASGD, weight copies."""
        return self.delayed.most_pending_bytes if self.delayed else 0

    def summary(self) -> dict[str, Any]:
        """Scalars of the run; what is neither applied nor dropped at its end counts as dropped."""
        tally, settings = self.schedule.tally, self.config.parallel
        return {
            "parallel": settings.kind,
            "workers": settings.workers,
            "updates": tally.updates,
            "applied_gradients": tally.applied,
            "dropped_gradients": tally.dropped + tally.pending,
            "drain": settings.drain if isinstance(settings, AsyncConfig) else None,
            "staleness_mean": tally.staleness_mean,
            "staleness_histogram": {str(s): count for s, count in sorted(tally.staleness_counts.items())},
            "sim_time_s": tally.now_s,
        }
