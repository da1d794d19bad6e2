"""A machine as it was measured: matrix products and collectives, kept as JSON in the cache folder.

Written by ``python -m harness.calibrate``, one file per machine, device and number of ranks; read by plans and by
the records of runs. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.collective import CollectiveTable
from harness.config import PlanConfig
from harness.environment import cache_folder
from harness.machine import Machine, ProductRates
from harness.measure import devices


@dataclass(frozen=True)
class Calibration:
    """What was measured with ``world_size`` ranks at once, each on a device of its own or on a share of the cores."""

    host: str
    device: str  # GPU's name, or the CPU's
    on_gpu: bool
    world_size: int
    date: str  # UTC
    versions: dict[str, str | None]
    products: dict[str, ProductRates]  # by precision
    collectives: tuple[CollectiveTable, ...]

    @property
    def file_name(self) -> str:
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        return f"{self.host}-{device}-w{self.world_size}.json"


def folder() -> Path:
    """Where calibrations lie."""
    return cache_folder() / "calibration"


def save(calibration: Calibration) -> Path:
    """Write a calibration whole; an earlier one of the same machine and world is replaced."""
    from harness.rundir import write_json

    path = folder() / calibration.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(calibration))
    return path


def load_all(host: str | None = None) -> list[Calibration]:
    """The calibrations of a host, by default this one, newest first; unreadable files are no calibrations."""
    host = host or socket.gethostname()
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            calibration = read(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if calibration.host == host:
            found.append(calibration)
    return sorted(found, key=lambda each: each.date, reverse=True)


def read(values: dict[str, Any]) -> Calibration:
    products = {
        precision: ProductRates(tuple(rates["sizes"]), tuple(rates["flops_per_second"]))
        for precision, rates in values["products"].items()
    }
    tables = tuple(
        CollectiveTable(each["operation"], each["world_size"], tuple(each["sizes"]), tuple(each["seconds"]))
        for each in values["collectives"]
    )
    return Calibration(**{**values, "products": products, "collectives": tables})


def machine_here(plan: PlanConfig, precision: str, gpu: str | None, world_size: int | None = None) -> Machine:
    """This machine: as calibrated, else its GPU from the data sheet, else one of which nothing is known.

    Args:
        gpu: the device's name; None on a CPU.
        world_size: ranks of interest; what was measured with as many is preferred.
    """
    alike = [each for each in load_all() if each.device == gpu or (gpu is None and not each.on_gpu)]
    measured = measured_machine(alike, precision, world_size)
    if measured is not None:
        return measured
    known = devices.find_device(gpu) if gpu is not None else None
    if known is not None and precision in known.peak_flops:
        return Machine.of_device(known.name, precision, plan.bandwidth, plan.efficiency)
    return Machine(None, plan.bandwidth, name=f"{gpu or 'this machine'}, not measured")


def measured_machine(calibrations: list[Calibration], precision: str, world_size: int | None = None) -> Machine | None:
    """The machine of the newest calibrations of one device; None without one for this precision.

    Args:
        world_size: ranks of interest; products measured with as many are preferred.
    """
    calibrations = [each for each in calibrations if precision in each.products]
    if not calibrations:
        return None
    alike = [each for each in calibrations if each.device == calibrations[0].device]
    chosen = next((each for each in alike if each.world_size == world_size), alike[0])
    tables: dict[tuple[str, int], CollectiveTable] = {}
    for each in alike:
        for table in each.collectives:
            tables.setdefault((table.operation, table.world_size), table)
    known = devices.find_device(chosen.device) if chosen.on_gpu else None
    return Machine(
        flops_per_second=None,
        bandwidth=None,
        peak_flops=known.peak_flops.get(precision) if known else None,
        memory_bytes=known.memory_bytes if known else None,
        name=f"{chosen.device}, measured {chosen.date[:10]}",
        tables=tuple(tables.values()),
        products=chosen.products[precision],
        measured_ranks=chosen.world_size,
        shared=not chosen.on_gpu,
    )
