"""Micro batches on their way to a rank's device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch

from harness.config import Config, grad_accum_steps, total_steps
from harness.data import Data
from harness.ranks import World

AHEAD = 4  # micro batches that wait in pinned memory at most


class Feed:
    """This rank's micro batches, update by update, on its device.

    For a GPU a thread builds them ahead in pinned memory, so that neither building nor copying makes the host wait for
    the device. On a CPU, where a thread would take its time from training, each is built when it is asked for.
    """

    def __init__(self, config: Config, world: World, data: Data, first: int):
        self.config = config
        self.world = world
        self.data = data
        self.first = first
        self._built: queue.Queue[Any] = queue.Queue(AHEAD)
        self._ahead = world.device.type == "cuda"
        if self._ahead:
            threading.Thread(target=self._build_ahead, daemon=True, name="feed").start()

    def update(self, step: int) -> tuple[torch.Tensor, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Targets of the global batch, a scalar, and this rank's micro batches of update ``step``.

        Updates must be asked for in order, from ``first``, and their micro batches used up.
        """
        if self._ahead:
            targets, count = self._next(), grad_accum_steps(self.config.batch)
            batches: Iterator[Any] = (self._next() for _ in range(count))
        else:
            targets, batches = self._build(step)
        device = self.world.device
        on_device = (
            (ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)) for ids, labels in batches
        )
        return torch.full((), float(targets), device=device), on_device

    def _build(self, step: int) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        batch = self.config.batch
        assert batch.global_size is not None and batch.micro_size is not None
        return self.data.update_batches(step, batch.global_size, batch.micro_size, self.world.rank, self.world.size)

    def _build_ahead(self) -> None:
        try:
            torch.cuda.set_device(self.world.device)
            for step in range(self.first, total_steps(self.config)):
                targets, batches = self._build(step)
                self._built.put(targets)
                for ids, labels in batches:
                    self._built.put((ids.pin_memory(), labels.pin_memory()))
        except BaseException as error:
            self._built.put(error)

    def _next(self) -> Any:
        item = self._built.get()
        if isinstance(item, BaseException):
            raise item
        return item
