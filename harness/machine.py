"""What a rank computes and communicates with: a device from its data sheet, or a machine that was measured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from harness import collective
from harness.collective import AlphaBeta, CollectiveTable
from harness.measure import devices
from harness.traffic import Collective

HOP_LATENCY = 2.5e-6  # seconds per hop of a ring, llm-foundry's H100 step times from 128 to 512 GPUs
RANKS_PER_NODE = 8
# Bus bandwidth of a ring inside a node, bytes/s; between nodes of them one 400 Gb/s link per rank at 80 %.
NODE_BANDWIDTH = {"b200": 730e9, "h200": 365e9, "h100": 365e9, "a100": 230e9, "v100": 130e9, "mi300x": 300e9}
PCIE_BANDWIDTH = 20e9
NETWORK_BANDWIDTH = 40e9


@dataclass(frozen=True)
class ProductRates:
    """Measured FLOP/s of square matrix products, by ascending size of a side."""

    sizes: tuple[int, ...]
    flops_per_second: tuple[float, ...]

    def at(self, size: float) -> float:
        """FLOP/s of products of this size, between the measured ones along a line; beyond them the nearest."""
        above = bisect_left(self.sizes, size)
        if above == 0 or above == len(self.sizes):
            return self.flops_per_second[max(0, above - 1)]
        low, high = self.sizes[above - 1], self.sizes[above]
        slow, fast = self.flops_per_second[above - 1], self.flops_per_second[above]
        return slow + (fast - slow) * (size - low) / (high - low)


@dataclass(frozen=True)
class Machine:
    """What one rank computes and communicates with. What is None is not known, and nothing is guessed from it."""

    flops_per_second: float | None  # reached in matrix products
    bandwidth: float | None  # bus bandwidth, bytes/s
    hop_latency: float = 0.0  # seconds
    peak_flops: float | None = None
    memory_bytes: float | None = None
    name: str = ""
    network_bandwidth: float | None = None  # bus bandwidth of a ring that leaves the node; None: the same
    tables: tuple[CollectiveTable, ...] = ()  # measured, used instead of bandwidth and latency
    products: ProductRates | None = None  # measured, used instead of flops_per_second
    measured_ranks: int = 1  # that computed at the same time when the products were measured
    shared: bool = False  # the ranks of a machine share its cores and its memory
    most_ranks: int | None = None  # that share a machine, more need further machines; None: all share one

    @classmethod
    def of_device(
        cls,
        name: str,
        precision: str,
        bandwidth: float | None = None,
        efficiency: float = 0.5,
        hop_latency: float = HOP_LATENCY,
    ) -> Machine:
        """A known device that reaches this share of its peak.

        Args:
            bandwidth: bytes/s of every ring; None: the device's usual inside a node and between nodes.

        Raises:
            ValueError: an unknown device, or one without this precision; names the known ones.
        """
        device = devices.find_device(name)
        if device is None:
            raise ValueError(f"plan.device={name}: unknown; choose one of {', '.join(devices.device_names())}")
        peak = device.peak_flops.get(precision)
        if peak is None:
            raise ValueError(f"precision={precision}: {device.name} has only {', '.join(device.peak_flops)}")
        inside, outside = bandwidth, bandwidth
        if inside is None or outside is None:
            family = device.name.split("-")[0] if "pcie" not in device.name else ""
            inside = NODE_BANDWIDTH.get(family, PCIE_BANDWIDTH)
            outside = min(inside, NETWORK_BANDWIDTH)
        return cls(
            efficiency * peak, inside, hop_latency, peak, device.memory_bytes, device.name, network_bandwidth=outside
        )

    def rate(self, size: float, world_size: int) -> float | None:
        """FLOP/s of one rank in products of about this size.

        Ranks that share a machine's cores get less the more of them there are.
        """
        if self.products is None:
            return self.flops_per_second
        if not self.shared:
            return self.products.at(size)
        return self.products.at(size) * self.measured_ranks / self.ranks_together(world_size)

    def ranks_together(self, world_size: int) -> int:
        """How many ranks share what a machine has."""
        if not self.shared:
            return 1
        return world_size if self.most_ranks is None else min(world_size, self.most_ranks)

    def memory_of_rank(self, world_size: int) -> float | None:
        """Bytes that one rank may take."""
        return None if self.memory_bytes is None else self.memory_bytes / self.ranks_together(world_size)

    def seconds(self, collective_: Collective, world_size: int) -> float | None:
        """Seconds of all calls of one kind of collective, one after another.

        From the table of this operation and world if there is one, else from the fit of the nearest world's table
        with its latency scaled to the ring, else from bandwidth and latency.
        """
        if world_size == 1 or collective_.payload == 0:
            return 0.0
        size = collective_.payload / collective_.calls
        known = [table for table in self.tables if table.operation == collective_.operation]
        if known:
            table = min(known, key=lambda each: (abs(each.world_size - world_size), each.world_size))
            if table.world_size == world_size:
                return collective_.calls * table.time(size)
            fit = fit_of(table)
            return None if fit is None else collective_.calls * fit.at(world_size).time(size)
        bandwidth = self.bandwidth
        if world_size > RANKS_PER_NODE and self.network_bandwidth is not None:
            bandwidth = self.network_bandwidth
        if bandwidth is None:
            return None
        latency = collective_.calls * self.hop_latency
        return collective.ring_time(collective_.operation, collective_.payload, world_size, bandwidth, latency)

    def measured_worlds(self) -> list[int]:
        return sorted({table.world_size for table in self.tables})


@lru_cache
def fit_of(table: CollectiveTable) -> AlphaBeta | None:
    """Latency and bandwidth of a table; None if its times are too noisy to have any."""
    try:
        return table.fit()
    except ValueError:
        return None
