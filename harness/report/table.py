"""The tables of a report: one row per run for programs, one row per point for people."""

from __future__ import annotations

import csv
import io
from typing import Any

from harness.report.record import NUMBERS, Run, flatten, is_number
from harness.report.series import Comparison, Point, Series, number_text
from harness.report.throughput import efficiency, measured_rates, speed_up

Row = dict[str, Any]


def run_rows(comparison: Comparison) -> list[Row]:
    """Every run, completed or not, with all its numbers. The same keys in every row; None where nothing applies.

    ``speed_up`` and ``efficiency`` are over the median of the smallest completed world of the run's series.
    """
    rows = []
    for series in comparison.by_ranks():
        rates = measured_rates(series)
        smallest = min(rates) if len(rates) >= 2 else None
        for run in sorted(series.runs, key=lambda run: (run.world_size or 0, run.config.get("seed") or 0, run.name)):
            row = run_row(run, series)
            rate = run.number("tokens_per_s")
            if smallest is not None and run.status == "completed" and rate and run.world_size:
                gain = speed_up(rate, rates[smallest].median)
                row |= {"baseline_world_size": smallest, "speed_up": gain}
                row["efficiency"] = gain * smallest / run.world_size
            rows.append(row)
    for key in comparison.varied:
        for row, (_, setting) in zip(rows, settings_in_order(comparison), strict=True):
            row.setdefault(key, setting.get(key))
    keys = list(dict.fromkeys(key for row in rows for key in row))
    tail = [key for key in ("hardware", "versions", "git_commit", "corpus_fingerprint") if key in keys]
    keys = [*(key for key in keys if key not in tail), *tail]
    return [{key: row.get(key) for key in keys} for row in rows]


def settings_in_order(comparison: Comparison) -> list[tuple[Run, dict[str, Any]]]:
    """Runs with their settings in the order of the rows."""
    settings = {id(run): setting for run, setting in zip(comparison.runs, comparison.settings, strict=True)}
    return [
        (run, settings[id(run)])
        for series in comparison.by_ranks()
        for run in sorted(series.runs, key=lambda run: (run.world_size or 0, run.config.get("seed") or 0, run.name))
    ]


def run_row(run: Run, series: Series) -> Row:
    config = run.config
    per_rank, micro = config["batch.per_rank_size"], config["batch.micro_size"]
    row: Row = {
        "study": run.study,
        "run": run.name,
        "status": run.status,
        "reason": run.reason,
        "series": series.label,
        "scaling": series.kind,
        "model": config.get("model.path") or config.get("model.name"),
        "engine": config["engine.kind"],
        "zero_stage": config["zero.stage"] if config["engine.kind"] == "deepspeed" else None,
        "precision": config["precision"],
        "arithmetic": run.summary.get("arithmetic"),
        "checkpointing": config["checkpointing.mode"],
        "optimizer": config["optimizer.kind"],
        "world_size": run.world_size,
        "global_batch_size": run.global_batch_size,
        "micro_batch_size": micro,
        "grad_accum_steps": per_rank // micro if per_rank and micro else None,
        "seed": config.get("seed"),
    }
    for key in NUMBERS:
        row.setdefault(key, run.number(key))
    extra = {key: value for key, value in flatten(run.summary).items() if key not in row and is_number(value)}
    extra = {key: value for key, value in extra.items() if not key.startswith("staleness_histogram.")}
    row |= {key: extra[key] for key in sorted(extra) if not key.startswith(("predicted.", "residual."))}
    for key, value in flatten({"predicted": run.summary.get("predicted") or {}}).items():
        if is_number(value):
            row[key] = value
            measured = row.get(key.removeprefix("predicted."))
            if is_number(measured) and value:
                row[key.replace("predicted.", "residual.", 1)] = measured / value - 1
    environment = run.environment
    row["hardware"] = environment.hardware or None
    row["versions"] = ", ".join(f"{name} {version}" for name, version in environment.versions) or None
    row["git_commit"] = environment.git_commit or None
    row["corpus_fingerprint"] = environment.corpus or None
    return row


def to_csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def point_rows(comparison: Comparison) -> list[dict[str, str]]:
    """One row per point, as text with units: medians over seeds, in brackets the smallest and largest."""
    rows = []
    asynchronous = any(run.config.get("parallel.kind") == "async" for run in comparison.runs)
    for series in comparison.by_ranks():
        efficiencies = efficiency(series)
        rates = measured_rates(series)
        base = rates[min(rates)].median if efficiencies else 0.0
        points: list[tuple[int | None, Point]] = list(series.by_ranks().items())
        unplaced = Point([run for run in series.runs if run.world_size is None])
        for ranks, point in points + ([(None, unplaced)] if unplaced.runs else []):
            kept = efficiencies.get(ranks) if ranks else None
            rows.append(
                {
                    "series": series.label,
                    "scaling": series.kind,
                    "ranks": str(ranks or "unknown"),
                    "global batch": ", ".join(sorted({str(run.global_batch_size or "?") for run in point.runs})),
                    "runs": str(len(point.runs)),
                    "status": ", ".join(f"{n} {s}" if len(point.runs) > 1 else s for s, n in point.statuses.items()),
                    "tokens/s": spread_text(point, "tokens_per_s"),
                    "step (ms)": spread_text(point, "step_time_s_median", 1000),
                    "step p90 (ms)": spread_text(point, "step_time_s_p90", 1000),
                    "MFU (%)": spread_text(point, "mfu", 100),
                    "peak memory (MiB/rank)": spread_text(point, "peak_memory_bytes", 2**-20),
                    "staleness": spread_text(point, "staleness_mean") if asynchronous else "",
                    "simulated time (s)": spread_text(point, "sim_time_s") if asynchronous else "",
                    "final loss": spread_text(point, "final_loss"),
                    "eval loss": spread_text(point, "eval_loss"),
                    "speed-up": f"{speed_up(rates[ranks].median, base):.2f}" if ranks and kept else "",
                    "efficiency (%)": f"{100 * kept.median:.1f}" if kept else "",
                }
            )
    empty = [key for key in rows[0] if all(not row[key] for row in rows)]
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]


def spread_text(point: Point, key: str, factor: float = 1.0) -> str:
    found = point.spread(key)
    if found is None:
        return ""
    median, low, high = (f"{value * factor:.4g}" if abs(value * factor) < 1e4 else f"{value * factor:.0f}"
                         for value in (found.median, found.low, found.high))  # fmt: skip
    return median if low == high else f"{median} ({low} to {high})"


def to_markdown(rows: list[dict[str, str]], heading: str, facts: list[str]) -> str:
    """A Markdown table below a heading and the facts that hold for all its rows."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    head = [line(list(rows[0])), line(["---"] * len(rows[0]))]
    body = [line(list(row.values())) for row in rows]
    return "\n".join([f"# {heading}", "", *(f"{fact}  " for fact in facts), "", *head, *body, ""])


def constant_facts(comparison: Comparison) -> str:
    """What is the same in all runs, in one line: the settings a reader asks for first."""
    constant = comparison.constant()
    keys = (
        "model", "data", "data.seq_len", "sharding", "precision", "checkpointing.mode", "optimizer.kind", "lr.base",
        "lr.rule", "batch.global_size", "batch.per_rank_size", "batch.micro_size", "train.samples", "train.steps",
    )  # fmt: skip
    known = [f"{key}={number_text(constant[key])}" for key in keys if constant.get(key) is not None]
    seeds = sorted({run.config.get("seed") or 0 for run in comparison.runs})
    return f"In all runs: {', '.join(known)}; seeds {', '.join(map(str, seeds[:10]))}{' …' if len(seeds) > 10 else ''}."
