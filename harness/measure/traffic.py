"""Bytes that collectives move, counted where they are issued."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.traffic import ring_factor

# c10d operator -> (name in the record, position of its input among the arguments)
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}


class TrafficCounter(TorchDispatchMode):
    """Counts calls and input bytes per collective while it is active, for any engine.

    Every collective, from Python or from C++, passes torch's dispatcher; bytes are those of the input of each call,
    as this rank gives it.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled; otherwise dynamo would give them up, for good."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, position = OPERATORS.get(func._opname, (func._opname, None))
            if position is not None:
                self.calls[name] = self.calls.get(name, 0) + 1
                self.bytes[name] = self.bytes.get(name, 0) + input_bytes(args[position])
        return func(*args, **(kwargs or {}))


def input_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(input_bytes(item) for item in value)


def ring_traffic_bytes(sent: dict[str, int], world_size: int) -> int:
    """Bytes a rank sends over the wire for collectives of these input bytes, with ring algorithms.

    By :func:`harness.traffic.ring_factor` of the whole tensor, which for an all-gather is its input times the ranks;
    an average over the ranks for reduce and broadcast, whose end of the ring sends nothing.
    """
    total = 0.0
    for name, count in sent.items():
        if name == "all_to_all":
            total += count * (world_size - 1) / world_size
        else:
            total += ring_factor(name, world_size) * count * (world_size if name == "all_gather" else 1)
    return round(total)
