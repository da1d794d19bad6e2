"""Measures this machine in a minute: ``python -m harness.calibrate [launch.world_size=N]``.

Starts a world of that many ranks (all GPUs, or 2 on a CPU), times matrix products on all of them at once and
collectives over sizes, and keeps the medians (:mod:`harness.calibration`). Plans and records of runs then use them.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.calibration import Calibration, read, save
from harness.collective import CollectiveTable, busbw
from harness.config import ConfigError
from harness.environment import set_rank_environment, visible_gpus
from harness.forkserver import Ranks, StartError, places_here
from harness.machine import ProductRates

if TYPE_CHECKING:
    import torch

    from harness.ranks import World

SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of square products
SIZES = tuple(4**power for power in range(5, 15))  # bytes, 1 KiB to 256 MiB
PRODUCTS_S = 8.0  # the longest that products of all precisions may take
COLLECTIVES_S = 15.0  # and all collectives
TRIAL_S = 0.25  # spent on one size


def main(arguments: list[str]) -> int:
    if set_rank_environment():
        be_rank()
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        world_size = asked_world_size(arguments)
        calibration = run_world(world_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    keep(calibration)
    return 0


def be_rank() -> NoReturn:
    """Measure as one of a launcher's ranks, on this host or several."""
    from harness.ranks import World, leave

    calibration = measure(World.join())
    if calibration is not None:
        keep(calibration)
    leave(0)


def keep(calibration: Calibration) -> None:
    """Save what was measured, and show it."""
    path = save(calibration)
    print_calibration(calibration)
    print(path)


def asked_world_size(arguments: list[str]) -> int:
    """``launch.world_size``, else all GPUs, or 2 ranks on a CPU.

    Raises:
        ConfigError: for anything else on the command line, or more ranks than GPUs.
    """
    from harness.compose import check_ranks

    gpus = visible_gpus()
    world_size = gpus or 2
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "launch.world_size" or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{argument}: only launch.world_size=N can be chosen")
        world_size = int(value)
    check_ranks(world_size, gpus)
    return world_size


def run_world(world_size: int) -> Calibration:
    """Measure in a world of ranks of this machine, started as a run's world is.

    Raises:
        ConfigError: with the last words of the world when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calibration.json"
        try:
            Ranks(places_here(world_size), Path(folder)).run(write_measurements, out)
        except StartError as error:
            raise ConfigError(f"calibration: {error}") from error
        if not out.exists():
            logs = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.log")))
            words = [line for line in logs.splitlines() if line.strip()] or ["no word"]
            raise ConfigError(f"calibration: the world of {world_size} ranks failed ({words[-1]})")
        return read(json.loads(out.read_text()))


def write_measurements(world: World, out: Path) -> None:
    """What each rank of a world that was started here does; rank 0 writes."""
    from harness.rundir import write_json

    calibration = measure(world)
    if calibration is not None:
        write_json(out, asdict(calibration))


def measure(world: World) -> Calibration | None:
    """Measure as one of the ranks; what was found, on rank 0."""
    import torch
    import torch.distributed as dist

    from harness.measure.hardware import cpu_name, describe_environment
    from harness.ranks import fix_threads

    fix_threads()
    world.init_process_group()
    products = measure_products(world)
    tables = measure_collectives(world) if world.size > 1 else []
    dist.barrier()
    dist.destroy_process_group()
    if world.rank != 0:
        return None
    on_gpu = torch.cuda.is_available()
    versions = describe_environment("")["versions"]
    return Calibration(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name() if on_gpu else cpu_name(),
        on_gpu=on_gpu,
        world_size=world.size,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={name: versions[name] for name in ("python", "torch")},
        products=products,
        collectives=tuple(tables),
    )


def measure_products(world: World) -> dict[str, ProductRates]:
    """FLOP/s of square products by precision, on the slowest rank while all compute."""
    import torch

    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if world.device.type == "cuda":
        precisions["fp16"] = torch.float16
    found: dict[str, ProductRates] = {}
    for precision, dtype in precisions.items():
        deadline = time.monotonic() + PRODUCTS_S / len(precisions)
        sides: list[int] = []
        rates: list[float] = []
        for side in SIDES:
            a, b = (torch.randn(side, side, device=world.device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = median_seconds(world, partial(torch.matmul, a, b, out=out))
            sides.append(side)
            rates.append(2 * side**3 / seconds)
            # the next takes some eight times as long, three times at least
            if not agree(world, time.monotonic() + 8 * 4 * seconds < deadline):
                break
        found[precision] = ProductRates(tuple(sides), tuple(rates))
    return found


def measure_collectives(world: World) -> list[CollectiveTable]:
    """Seconds of each operation over sizes of the whole tensor, on the slowest rank."""
    import torch
    import torch.distributed as dist

    def calls(size: int) -> dict[str, Callable[[], Any]]:
        whole = torch.zeros(max(world.size, size // 4 // world.size * world.size), device=world.device)
        part = torch.zeros(whole.numel() // world.size, device=world.device)
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce": lambda: dist.reduce(whole, 0),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }

    tables = []
    operations = list(calls(4))
    for operation in operations:
        deadline = time.monotonic() + COLLECTIVES_S / len(operations)
        sizes: list[float] = []
        seconds: list[float] = []
        for size in SIZES:
            seconds.append(median_seconds(world, calls(size)[operation]))
            sizes.append(float(size))
            if not agree(world, time.monotonic() + 4 * 4 * seconds[-1] < deadline):
                break
        tables.append(CollectiveTable(operation, world.size, tuple(sizes), tuple(seconds)))
    return tables


def median_seconds(world: World, call: Callable[[], Any]) -> float:
    """The median time of a call on the slowest rank, of three or more after one that warms up."""
    import torch.distributed as dist

    call()
    synchronise(world.device)
    dist.barrier()
    started = time.perf_counter()
    call()
    synchronise(world.device)
    once = world.max_over_ranks([time.perf_counter() - started])[0]
    times = []
    repeats = 1 if once > TRIAL_S / 50 else 10  # several at once where a clock would be too coarse
    for _ in range(max(3, min(20, int(TRIAL_S / (once * repeats + 1e-9))))):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronise(world.device)
        times.append((time.perf_counter() - started) / repeats)
    return world.max_over_ranks([statistics.median(times)])[0]


def synchronise(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agree(world: World, goes_on: bool) -> bool:
    """Whether every rank wants to go on."""
    return world.max_over_ranks([0.0 if goes_on else 1.0])[0] == 0


def print_calibration(calibration: Calibration) -> None:
    """What was measured, for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    ranks = f"{calibration.world_size} ranks" if calibration.world_size > 1 else "1 rank"
    console.print(f"{calibration.device}, {ranks}", markup=False)
    products = Table(
        box=box.SIMPLE_HEAD, title="square matrix products by side, GFLOP/s per rank", title_justify="left"
    )
    products.add_column("side")
    sides = sorted({side for rates in calibration.products.values() for side in rates.sizes})
    for side in sides:
        products.add_column(str(side), justify="right")
    for precision, rates in calibration.products.items():
        products.add_row(precision, *(product_text(rates, side) for side in sides))
    console.print(products)
    if not calibration.collectives:
        return
    tables = Table(
        box=box.SIMPLE_HEAD,
        title="collectives: latency in us, then bus bandwidth by size in GB/s",
        title_justify="left",
    )
    tables.add_column("operation")
    tables.add_column("latency", justify="right")
    sizes = sorted({size for table in calibration.collectives for size in table.sizes})
    for size in sizes:
        tables.add_column(f"{size / 2**20:g}M" if size >= 2**20 else f"{size / 2**10:g}K", justify="right")
    for table in calibration.collectives:
        tables.add_row(
            table.operation, f"{min(table.seconds) * 1e6:.0f}", *(bandwidth_text(table, size) for size in sizes)
        )
    console.print(tables)


def product_text(rates: ProductRates, side: int) -> str:
    if side not in rates.sizes:
        return ""
    return f"{rates.flops_per_second[rates.sizes.index(side)] / 1e9:.3g}"


def bandwidth_text(table: CollectiveTable, size: float) -> str:
    if size not in table.sizes:
        return ""
    seconds = table.seconds[table.sizes.index(size)]
    return f"{busbw(table.operation, size, seconds, table.world_size) / 1e9:.2g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
