"""Memory that a process holds."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor

from harness.environment import cgroup_free_bytes, ranks_on_host


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which shares its memory; all of one that is not sharded by FSDP2."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each storage counted once."""
    parts = [local_part(tensor) for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts if t.numel()}
    return sum(storages.values())


class HeldBytes:
    """What a rank holds just before its second update, when optimizer states exist and gradients are there.

    Args:
        optimizer: its steps are watched; a step that an engine or a delay makes without moving weights comes before.
        held: the tensors by kind.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, held: Callable[[], dict[str, list[torch.Tensor]]]):
        self.bytes: dict[str, int] = {}
        self.updates = 0  # of the engine
        self._held = held
        self._first_moved: int | None = None  # the update in which the weights first moved
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        if self._first_moved is None:
            self._first_moved = self.updates
        elif self.updates > self._first_moved and not self.bytes:
            self.bytes = {kind: unique_bytes(tensors) for kind, tensors in self._held().items()}


def free_memory_bytes(device: torch.device) -> int:
    """Bytes this rank may still take: of its GPU, or its share of what the host and its control group have left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, below_limit = psutil.virtual_memory().available, cgroup_free_bytes()
    return (free if below_limit is None else min(free, below_limit)) // ranks_on_host()


def peak_memory_bytes() -> int:
    """Most memory this rank ever held: allocated on its GPU, or resident on the host without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
