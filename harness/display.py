"""What a person sees of a run: progress while it works, a table at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_LINE_EVERY_S = 1.0


class Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, file: TextIO, steps: int, title: str):
        self.console = Console(file=file, soft_wrap=True, highlight=False)
        self.steps = steps
        self.printed_at = -float("inf")
        self.progress = Progress(
            TextColumn(title, markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, numbers="starting")
        self.progress.start()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def update(self, row: dict[str, Any]) -> None:
        """Show the newest row of metrics."""
        loss = "nan" if row["loss"] is None else f"{row['loss']:.4f}"
        numbers = f"loss {loss}  {row['tokens_per_s']:,.0f} tokens/s"
        self.progress.update(self.task, completed=row["step"], numbers=numbers)
        due = time.monotonic() - self.printed_at >= PLAIN_LINE_EVERY_S or row["step"] == self.steps
        if self.progress.disable and due:
            self.printed_at = time.monotonic()
            self.say(f"update {row['step']}/{self.steps}  {numbers}")

    def close(self) -> None:
        self.progress.stop()


def print_outcome(file: TextIO, path: str, status: dict[str, Any], summary: dict[str, Any] | None) -> None:
    """The end of a run: a table of what it measured, where it lies and how to look at it; or why there is none."""
    console = Console(file=file, soft_wrap=True, highlight=False)
    if status["status"] != "completed" or summary is None:
        console.print(f"{status['status']}: {status['reason']}  ({path})", markup=False)
        return
    ranks = "1 rank" if summary["world_size"] == 1 else f"{summary['world_size']} ranks"
    table = Table(title=f"{summary['engine']}, ZeRO stage {summary['zero_stage']}, {ranks}")
    if summary["zero_stage"] is None:
        table.title = f"{summary['engine']}, {ranks}"
    table.add_column("measured", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    for row in outcome_rows(summary):
        table.add_row(*row)
    console.print(table)
    console.print(f"run directory  {path}", markup=False)
    if summary.get("wandb_dir"):
        console.print(f"look at it     wandb leet {summary['wandb_dir']}", markup=False)
        console.print(f"upload it      wandb sync {summary['wandb_dir']}", markup=False)


def outcome_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured, how much of it there was, and what was predicted; empty where nothing was."""
    expected = summary.get("predicted") or {}

    def row(label: str, key: str, text: Callable[[Any], str]) -> tuple[str, str, str]:
        return label, text(summary[key]), text(expected[key]) if expected.get(key) is not None else ""

    rows = [
        ("first loss → final loss", f"{number(summary['first_loss'])} → {number(summary['final_loss'])}", ""),
        ("evaluation loss", number(summary["eval_loss"]), ""),
        row("tokens/s, all ranks", "tokens_per_s", lambda value: f"{value:,.0f}"),
        row("step time, median", "step_time_s_median", lambda value: f"{value:.3f} s"),
        ("step time, 90th percentile", f"{summary['step_time_s_p90']:.3f} s", ""),
    ]
    if summary["pending_gradient_bytes"] is not None:
        rows += [
            row("gradients pending, held by a rank", "pending_gradient_bytes", size),
            row("staleness, mean", "staleness_mean", number),
            row("simulated time", "sim_time_s", lambda value: f"{value:,.0f} s"),
        ]
    if summary.get("mfu") is not None:
        rows.append(row("MFU", "mfu", lambda value: f"{value:.1%}"))
    rows += [
        row("peak memory of a rank", "peak_memory_bytes", size),
        row("parameters, held by a rank", "param_bytes", size),
        row("gradients, held by a rank", "grad_bytes", size),
        row("optimizer, held by a rank", "optimizer_bytes", size),
    ]
    sent = expected.get("comm_bytes_per_step") or {}
    for operation, count in (summary["comm_bytes_per_step"] or {}).items():
        rows.append(
            (f"{operation} per update and rank", size(count), size(sent[operation]) if operation in sent else "")
        )
    return rows


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def size(count: float | None) -> str:
    """Bytes for people: decimal units."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
