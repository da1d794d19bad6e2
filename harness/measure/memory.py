"""Memory that a process holds."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def peak_memory_bytes() -> int:
    """Most memory this rank ever held: allocated on its GPU, or resident on the host without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
