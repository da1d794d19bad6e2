"""A plan as tables for people and as JSON for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from harness.config import grad_accum_steps
from harness.memory import model_state_bytes
from harness.prediction import activations
from harness.scenario import Row, WorldPlan

if TYPE_CHECKING:
    from harness.plan import Plan

WIDTH = 120
STAGE_OF = {"ddp": 0, "fsdp": 3}  # which stage a convention counts like it
CONVENTIONS = {"no-master": "12", "paper": "16"}  # bytes per parameter of one rank
NAMES = {"zero0": "ZeRO-0", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "ddp": "DDP", "fsdp": "FSDP2"}


def convention_bytes(plan: Plan, row: Row, convention: str) -> float:
    """Model states of one rank as a named convention counts them."""
    kind = row.prediction.kind
    stage = STAGE_OF[kind] if kind in STAGE_OF else int(kind.removeprefix("zero"))
    return model_state_bytes(plan.shape.params, stage, row.prediction.world_size, convention).total


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; bytes, seconds, elements."""
    config = plan.config
    return {
        "model": config.model.name,
        "n_params": plan.shape.params,
        "precision": config.precision,
        "checkpointing": config.checkpointing.mode,
        "seq_len": config.data.seq_len,
        "tokens": plan.tokens,
        "machine": {
            "name": plan.machine.name,
            "measured": plan.machine.products is not None,
            "measured_world_sizes": plan.machine.measured_worlds(),
            "memory_bytes": plan.machine.memory_bytes,
            "peak_flops": plan.machine.peak_flops,
        },
        "worlds": [world_dict(plan, world) for world in plan.worlds],
        "unknown": list(plan.unknown),
    }


def world_dict(plan: Plan, world: WorldPlan) -> dict[str, Any]:
    row = world.rows[0]
    return {
        "world_size": world.world_size,
        "assumed": world.assumed or None,
        "global_batch_size": row.batch.global_size,
        "micro_batch_size": row.batch.micro_size,
        "grad_accum_steps": grad_accum_steps(row.batch),
        "activation_bytes": activations_by_mode(plan, row),
        "cheapest": world.cheapest,
        "rows": [row_dict(plan, row) for row in world.rows],
    }


def activations_by_mode(plan: Plan, row: Row) -> dict[str, float]:
    """Bytes of one micro batch's activations by checkpointing mode."""
    from dataclasses import replace

    config = replace(plan.config, batch=row.batch)
    kind = row.prediction.kind
    return {mode: activations(config, plan.shape, kind, mode).most for mode in ("none", "selective", "full")}


def row_dict(plan: Plan, row: Row) -> dict[str, Any]:
    p = row.prediction
    return {
        "kind": p.kind,
        "param_bytes": p.states.param,
        "grad_bytes": p.states.grad,
        "optimizer_bytes": p.states.optimizer,
        "buffer_bytes": p.states.buffer,
        "pending_gradient_bytes": p.states.pending,
        "activation_bytes": p.activations.most,
        "peak_memory_bytes": p.memory_bytes,
        "state_bytes_by_convention": {name: convention_bytes(plan, row, name) for name in CONVENTIONS},
        "fits": p.fits,
        "largest_micro_size": row.largest_micro_size,
        "comm_bytes_per_step": p.comm_bytes_per_step,
        "comm_calls_per_step": p.comm_calls_per_step,
        "comm_traffic_bytes": p.comm_traffic_bytes,
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "exposed_s": p.exposed_s,
        "step_time_s": p.step_time_s,
        "tokens_per_s": p.tokens_per_s,
        "mfu": p.mfu,
        "days": p.days(plan.tokens),
    }


def print_plan(plan: Plan) -> None:
    """Tables of at most 120 columns on standard output."""
    from rich.console import Console

    console = Console(width=WIDTH, file=sys.stdout, highlight=False)
    config, machine = plan.config, plan.machine
    memory = "memory not known" if machine.memory_bytes is None else f"{bytes_text(machine.memory_bytes)} of memory"
    console.print(
        f"{config.model.name}, {number_text(plan.shape.params)} parameters, {config.precision}, sequences of "
        f"{config.data.seq_len} tokens, optimizer {config.optimizer.kind}, checkpointing {config.checkpointing.mode}",
        markup=False,
    )
    console.print(f"on {machine.name}, {memory}; {number_text(plan.tokens)} tokens to train on", markup=False)
    console.print(
        "Bytes of one rank as each engine really holds them: parameters that forward reads, gradients, moments and fp32 "
        "master weights, buffers and gathered parameters, activations of one micro batch; total: the most at one time. Beside them the states by two "
        "conventions: 12 bytes per parameter (no fp32 master weights) and the ZeRO paper's 16. micro: the largest micro "
        "batch that fits. sent: by one rank per update, in rings.",
        markup=False,
        style="dim",
    )
    for world in plan.worlds:
        console.print()
        print_world(console, plan, world)
    console.print()
    console.print("What this plan does not know")
    for sentence in plan.unknown:
        console.print(f"- {sentence}", markup=False)


def print_world(console: Any, plan: Plan, world: WorldPlan) -> None:
    from rich import box
    from rich.table import Table

    first = world.rows[0]
    ranks = f"{world.world_size} rank{'' if world.world_size == 1 else 's'}"
    console.print(
        f"[bold]{ranks}[/bold]: {first.batch.global_size} sequences per update = {ranks} x "
        f"{grad_accum_steps(first.batch)} x {first.batch.micro_size}"
    )
    if world.assumed:
        console.print(world.assumed, markup=False)
    kept = ", ".join(
        f"{bytes_text(count)} with checkpointing={mode}" for mode, count in activations_by_mode(plan, first).items()
    )
    console.print(f"activations: {kept}", markup=False)
    unit, scale = unit_of([row.prediction.memory_bytes for row in world.rows])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    pending = ["pending"] if any(row.prediction.states.pending for row in world.rows) else []
    conventions = [] if pending else list(CONVENTIONS)  # there is no room for both
    heads = [
        "param",
        "grad",
        "optim",
        "buffer",
        *pending,
        "activ",
        "total",
        *(f"({CONVENTIONS[c]})" for c in conventions),
    ]
    for head in [unit, *heads, "fits", "micro", "sent", "compute", "exposed", "tok/s", "MFU", "days"]:
        table.add_column(head, justify="left" if head == unit else "right", no_wrap=True)
    for row in world.rows:
        p = row.prediction
        parts = (
            p.states.param,
            p.states.grad,
            p.states.optimizer,
            p.states.buffer,
            *([p.states.pending] if pending else []),
            p.activations.most,
            p.memory_bytes,
        )
        numbers = [*parts, *(convention_bytes(plan, row, name) for name in conventions)]
        table.add_row(
            NAMES[p.kind],
            *(digits(number / scale) for number in numbers),
            {True: "yes", False: "no", None: "?"}[p.fits],
            "?" if row.largest_micro_size is None else f"{row.largest_micro_size}",
            digits(p.comm_traffic_bytes / scale),
            seconds_text(p.compute_s),
            seconds_text(p.exposed_s),
            "?" if p.tokens_per_s is None else number_text(p.tokens_per_s),
            "?" if p.mfu is None else f"{p.mfu:.0%}",
            "?" if (days := p.days(plan.tokens)) is None else digits(days),
            style="bold" if p.kind == world.cheapest else None,
        )
    console.print(table)
    if world.cheapest is None:
        console.print("no stage fits")
    else:
        fits = "that fit" if plan.machine.memory_bytes is not None else "(whether they fit is not known)"
        console.print(f"of the stages {fits}, {NAMES[world.cheapest]} sends least", markup=False)


def unit_of(counts: list[float]) -> tuple[str, float]:
    largest = max(counts)
    return next(
        (unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if largest >= scale
    )


def bytes_text(count: float) -> str:
    unit, scale = unit_of([max(count, 1.0)])
    return f"{digits(count / scale)} {unit}"


def digits(value: float) -> str:
    """Three digits, no exponent while it fits."""
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:.0f}" if value < 1e6 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return (
        f"{value:.1f}"
        if value >= 9.995
        else f"{value:.2f}"
        if value >= 0.00995
        else f"{value:.0e}".replace("e-0", "e-")
    )


def number_text(value: float) -> str:
    """Three digits with k, M, G or T."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{digits(value / scale)}{unit}"
    return digits(value)


def seconds_text(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{digits(value)}s" if value >= 1 else f"{digits(value * 1e3)}ms" if value > 0 else "0"
