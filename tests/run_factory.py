"""Makes run directories as a finished run leaves them, from configs composed by Hydra."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from harness.config import Config, grad_accum_steps, register_schemas, resolve, to_config, total_steps
from harness.rundir import RunDir, write_json

CONF = Path(__file__).parents[1] / "conf"
PARAMETERS = 820_000
ENVIRONMENT = {
    "versions": {"deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.24.0"},
    "hardware": {"cpu": "a test CPU", "cores": 2, "gpus": []},
    "git_commit": "0123456789abcdef",
    "corpus_fingerprint": "c0ffee",
}


@cache
def compose_config(overrides: tuple[str, ...]) -> Config:
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(compose("config", list(overrides)))


def composed(runs_dir: Path, *overrides: str, study: str = "study") -> Config:
    """A config as Hydra composes it, not resolved."""
    return replace(compose_config(overrides), runs_dir=str(runs_dir), study=study)


def resolved(runs_dir: Path, *overrides: str, world_size: int = 1, study: str = "study") -> Config:
    return resolve(composed(runs_dir, *overrides, study=study), world_size, on_gpu=False)


def summary_of(config: Config, tokens_per_s: float = 1000.0, **more: Any) -> dict[str, Any]:
    """A summary with every documented number, in proportion to world, stage and batch."""
    world, stage, batch = config.launch.world_size, config.zero.stage, config.batch.global_size
    assert world and batch
    step_time = batch * config.data.seq_len / tokens_per_s
    share = [world if stage > level else 1 for level in (0, 1, 2)]
    param, grad, optimizer = 4 * PARAMETERS / share[2], 4 * PARAMETERS / share[1], 8 * PARAMETERS / share[0]
    size = 4.0 * PARAMETERS if world > 1 else 0.0
    sent = {"all_reduce": size} if stage < 3 else {"reduce_scatter": size, "all_gather": 2 * size / world}
    if stage in (1, 2):
        sent["all_gather"] = size / world
    return {
        "world_size": world, "zero_stage": stage, "engine": config.engine.kind, "global_batch_size": batch,
        "micro_batch_size": config.batch.micro_size, "grad_accum_steps": grad_accum_steps(config.batch),
        "lr": config.lr.base, "n_params": PARAMETERS, "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_rank": tokens_per_s / world, "samples_per_s": tokens_per_s / config.data.seq_len,
        "step_time_s_median": step_time, "step_time_s_p90": 1.2 * step_time, "mfu": None, "hfu": None,
        "tflops_per_rank": 0.01, "peak_memory_bytes": param + grad + optimizer + 2e6, "param_bytes": param,
        "grad_bytes": grad, "optimizer_bytes": optimizer, "comm_bytes_per_step": sent, "comm_traffic_bytes": 2 * size,
        "final_loss": 2.0, "eval_loss": 2.1, "skipped_steps": 0, "staleness_mean": None, "pending_gradient_bytes": None,
        "predicted": {"tokens_per_s": 900.0, "param_bytes": param}, "objective": 2.0,
    } | more  # fmt: skip


def loss_at(samples: float) -> float:
    return 1.5 + 4.0 * math.exp(-samples / 1500)


def metric_rows(
    config: Config, steps: int | None = None, tokens_per_s: float = 1000.0, shift: float = 0.0
) -> list[dict]:
    """Rows of metrics.jsonl, one per update, on a smooth loss curve moved by ``shift``."""
    batch = config.batch.global_size
    assert batch
    rows = []
    for step in range(1, (steps or total_steps(config)) + 1):
        samples = step * batch
        time = samples * config.data.seq_len / tokens_per_s
        rows.append(
            {
                "step": step, "samples": samples, "tokens": samples * config.data.seq_len, "lr": 0.002, "grad_norm": 1.0,
                "loss": loss_at(samples) + shift, "step_time_s": time / step, "tokens_per_s": tokens_per_s, "wall_s": time,
            }
        )  # fmt: skip
    return rows


def make_run(
    config: Config,
    status: Any = "completed",
    reason: str = "",
    rows: list[dict] | None = None,
    environment: dict | None = None,
    **summary: Any,
) -> RunDir:
    """A run directory; only a completed run has a summary, a run that was refused has no rows either."""
    run = RunDir.create(config, "command")
    write_json(run.path / "env.json", ENVIRONMENT if environment is None else environment)
    if config.batch.per_rank_size is not None:
        rate = summary.get("tokens_per_s", 1000.0)
        run.append_metrics(metric_rows(config, tokens_per_s=rate) if rows is None else rows)
        if status == "completed":
            run.write_summary(summary_of(config, **summary))
    run.write_status(status, reason)
    return run


def make_study(runs_dir: Path, seeds: int, rates: tuple[float, ...], steps: int = 150, study: str = "large") -> int:
    """A study of 4 stages x 5 world sizes x learning rates x seeds, some of it failed; returns how many runs."""
    base = resolved(runs_dir, "batch.global_size=32", f"train.steps={steps}", study=study)
    rows = metric_rows(base)
    count = 0
    for stage in range(4):
        for world in (1, 2, 4, 8, 16):
            for number, lr in enumerate(rates):
                for seed in range(seeds):
                    config = replace(
                        base,
                        zero=replace(base.zero, stage=stage),
                        lr=replace(base.lr, base=lr),
                        launch=replace(base.launch, world_size=world),
                        batch=replace(base.batch, per_rank_size=32 // world, micro_size=32 // world),
                        seed=seed,
                    )
                    if stage == 0 and world == 1 and number == 0:
                        make_run(config, "oom", "CUDA out of memory on rank 0", rows=rows[:40])
                    else:
                        rate = 1000.0 * world * 0.9 ** (world.bit_length() - 1) * (1 + 0.01 * seed)
                        make_run(config, rows=rows, tokens_per_s=rate, final_loss=2.0 + lr + 0.01 * seed)
                    count += 1
    return count
