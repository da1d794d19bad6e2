"""A run on paper: ``python -m harness.plan [the same overrides as a run] [--json]``.

For every ZeRO stage, DDP and FSDP2 and every entry of ``plan.world_sizes``: what a rank holds, whether it fits, what
it sends, how long an update takes, and what is not known. Starts no rank and allocates no weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from harness.config import Config, ConfigError, resolve_precision, to_config
from harness.environment import visible_gpus
from harness.hf_config import check_limits, model_shape
from harness.machine import Machine
from harness.scenario import WorldPlan, plan_world
from harness.shape import FAMILIES, ModelShape

if TYPE_CHECKING:
    from omegaconf import DictConfig

TOKENS_PER_PARAMETER = 20  # of plan.tokens=null; Hoffmann et al. 2022, arXiv:2203.15556


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    config: Config  # as composed, with its precision decided
    shape: ModelShape
    machine: Machine
    tokens: float
    worlds: tuple[WorldPlan, ...]
    unknown: tuple[str, ...]


def make_plan(config: Config) -> Plan:
    """The plan of a composed config.

    Raises:
        ConfigError: in one line; never for the batch, nor for a model too large.
    """
    check_limits(config)
    on_gpu = config.plan.device is not None or visible_gpus() > 0
    config = replace(config, precision=resolve_precision(config.precision, on_gpu))
    shape = model_shape(config.model)
    try:
        machine = find_machine(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    worlds = tuple(plan_world(config, shape, machine, size) for size in config.plan.world_sizes)
    tokens = config.plan.tokens or TOKENS_PER_PARAMETER * shape.params
    return Plan(config, shape, machine, tokens, worlds, tuple(unknowns(config, machine)))


def find_machine(config: Config) -> Machine:
    """The device that is planned for: measured if it is this machine's and was calibrated, else from its data sheet.

    Raises:
        ValueError: an unknown device; names the known ones.
    """
    from harness.calibration import load_all, machine_here, measured_machine
    from harness.measure.devices import find_device

    wanted, precision = config.plan.device, config.precision
    if wanted is not None:
        sheet = Machine.of_device(wanted, precision, config.plan.bandwidth, config.plan.efficiency)
        here = [each for each in load_all() if each.on_gpu and find_device(each.device) == find_device(wanted)]
        return measured_machine(here, precision) or sheet
    gpu = gpu_name()
    machine = machine_here(config.plan, precision, gpu)
    if gpu is None:
        machine = replace(machine, memory_bytes=float(psutil.virtual_memory().total), shared=True)
    return replace(machine, most_ranks=max([machine.measured_ranks, len(os.sched_getaffinity(0))]))


def gpu_name() -> str | None:
    """The name of this machine's first GPU."""
    if not visible_gpus():
        return None
    import torch

    return torch.cuda.get_device_name()


def unknowns(config: Config, machine: Machine) -> list[str]:
    """What the numbers leave out, in sentences."""
    found = []
    if machine.products is not None:
        found.append(
            f"Times are of matrix products and collectives as measured on {machine.name}; what is between the products "
            "(norms, softmax, loss, optimizer, Python) is not in them, and takes most of a small model's step."
        )
    elif machine.flops_per_second is not None:
        found.append(
            f"Computation is assumed to reach {config.plan.efficiency:.0%} of {machine.name}'s peak "
            "(plan.efficiency), which a small model or batch does not; `python -m harness.calibrate` on such a machine "
            "measures its products and collectives."
        )
    else:
        found.append(
            "Nothing is known of this machine's speed: name plan.device, or measure it by `python -m harness.calibrate`."
        )
    worlds = machine.measured_worlds()
    if worlds:
        found.append(
            f"Collectives were measured with {' and '.join(map(str, worlds))} ranks of one machine; beyond, latency is "
            "taken to grow with the ring and bandwidth to stay."
        )
    elif machine.bandwidth is not None:
        inside, outside = machine.bandwidth / 1e9, (machine.network_bandwidth or machine.bandwidth) / 1e9
        found.append(
            f"Rings are assumed to reach {inside:g} GB/s inside a node of 8 and {outside:g} GB/s between nodes, with "
            f"{machine.hop_latency * 1e6:g} us per hop; nothing was measured (plan.bandwidth)."
        )
    found += [
        "Activations are those of transformers' Llama and GPT-2 code; the allocator's gaps (few with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), the device's context and the kernels' workspaces are not "
        "counted, commonly 1 to 5 GB on a GPU.",
        "How much communication hides behind computation is the least certain part; it is taken as perfect overlap "
        "where the engine overlaps at all.",
        "Data loading, evaluation and checkpoints take no time here; stragglers and failures do not happen.",
        "Whether so large a batch still pays in loss: see the critical batch size.",
    ]
    family = config.model.family
    if family is not None and family not in FAMILIES:
        found.insert(0, f"model.family={family} is read as if it were Llama or GPT-2; parameters may differ.")
    return found


def main(arguments: list[str]) -> int:
    from harness.compose import run_hydra

    as_json = "--json" in arguments
    overrides = [argument for argument in arguments if argument != "--json"]
    if {"-m", "--multirun"} & set(overrides):
        print("error: -m: a plan is one; it shows every stage and plan.world_sizes by itself", file=sys.stderr)
        return 1
    plans: list[Plan] = []

    def task(composed: DictConfig) -> Any:
        plans.append(make_plan(to_config(composed)))

    try:
        run_hydra(overrides, task)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from harness.plan_page import print_plan, to_dict

    for plan in plans:
        if as_json:
            print(json.dumps(to_dict(plan), indent=2, allow_nan=False))
        else:
            print_plan(plan)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # whoever reads has seen enough
        sys.exit(main(sys.argv[1:]))
