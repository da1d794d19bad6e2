"""Common claims about data parallelism, each checked by a number that a run measured.

python experiments/claims/run.py --out experiments/claims/result.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = 4
# Everything is released after use and nothing is kept whole: the textbook's stage 3.
TEXTBOOK = ["zero.max_live_parameters=0", "zero.prefetch_bucket_size=0", "zero.param_persistence_threshold=0"]


def measure(ranks: int, *overrides: str, steps: int = STEPS) -> dict[str, Any]:
    """The summary of one run of ``gpt2_tiny``, with its losses."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, str(ROOT / "harness" / "main.py"), f"launch.world_size={ranks}", f"runs_dir={folder}",
            "wandb.mode=disabled", "data.eval_samples=0", "train.log_every=1", f"train.steps={steps}", *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(overrides)}: {done.stderr[-500:]}")
        (path,) = Path(folder).glob("*/*/summary.json")
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        return {**json.loads(path.read_text()), "losses": [row["loss"] for row in rows]}


def bytes_per_parameter(run: dict[str, Any]) -> float:
    return sum(run[f"{part}_bytes"] for part in ("param", "grad", "optimizer")) / run["n_params"]


def sent(run: dict[str, Any]) -> float:
    """What a rank sends in rings per update, in sizes of the parameters."""
    return run["comm_traffic_bytes"] / (run["n_params"] * (4 if run["precision"] == "fp32" else 2))


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def memory_claims() -> dict[str, Any]:
    stages = {stage: measure(1, f"zero=stage{stage}", "precision=bf16") for stage in (0, 1, 3)}
    sharded = {ranks: measure(ranks, "zero=stage3") for ranks in (1, 2, 4)}
    whole = sharded[1]
    return {
        "bytes_per_parameter_bf16_one_rank": {f"stage{s}": bytes_per_parameter(run) for s, run in stages.items()},
        "stage3_share_of_one_rank": {
            str(ranks): {part: run[f"{part}_bytes"] / whole[f"{part}_bytes"] for part in ("param", "grad", "optimizer")}
            for ranks, run in sharded.items()
        },
    }


def traffic_claims() -> dict[str, Any]:
    runs = {
        "stage0 (all-reduce)": measure(4, "zero=stage0"),
        "stage1": measure(4, "zero=stage1"),
        "stage1, reduce to the owner": measure(4, "zero=stage1", "zero.multi_rank_allreduce=false"),
        "stage3": measure(4, "zero=stage3"),
        "stage3, nothing kept": measure(4, "zero=stage3", *TEXTBOOK),
    }
    base = sent(runs["stage0 (all-reduce)"])
    return {
        name: {"sent": sent(run), "over_all_reduce": sent(run) / base, "given": run["comm_bytes_per_step"]}
        for name, run in runs.items()
    }


def equality_claims() -> dict[str, Any]:
    big = measure(1, "zero=stage0", "optimizer=sgd", steps=10)
    others = {
        "2 ranks": measure(2, "zero=stage0", "optimizer=sgd", steps=10),
        "4 ranks, stage 3": measure(4, "zero=stage3", "optimizer=sgd", steps=10),
        "2 ranks x 4 micro batches": measure(2, "zero=stage0", "optimizer=sgd", "batch.micro_size=4", steps=10),
    }
    split = others["2 ranks x 4 micro batches"]
    return {
        "largest_relative_loss_difference": {
            name: largest_difference(run["losses"], big["losses"]) for name, run in others.items()
        },
        "effective_batch": {
            "per_rank x ranks x accumulation": [
                split["micro_batch_size"], split["world_size"], split["grad_accum_steps"],
            ],
            "samples_per_update": split["samples"] / split["steps"],
        },
    }  # fmt: skip


def start_claim() -> dict[str, float]:
    """Two ranks with weights of their own: how far apart before and after DDP is built on them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, str(HERE / "start.py")], capture_output=True, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def overlap_claims(pairs: int) -> dict[str, Any]:
    """Step times of DDP, the variants in turn, so that the machine's moods meet all alike."""
    variants = {
        "buckets of 25 MiB, overlap": [],
        "buckets of 0.25 MiB, overlap": ["engine.bucket_mb=0.25"],
        "buckets of 0.01 MiB, overlap": ["engine.bucket_mb=0.01"],
        "buckets of 0.25 MiB, no overlap": ["engine.bucket_mb=0.25", "engine.overlap=false"],
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    calls = {}
    for _ in range(pairs):
        for name, overrides in variants.items():
            run = measure(2, "engine=ddp", "model.config.n_embd=256", *overrides, steps=30)
            times[name].append(run["step_time_s_median"])
            calls[name] = run["comm_calls_per_step"]["all_reduce"]
    return {
        name: {"calls": calls[name], "min": min(t), "median": statistics.median(t), "max": max(t)}
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
        "memory": memory_claims(),
        "traffic_4_ranks": traffic_claims(),
        "equality": equality_claims(),
        "start": start_claim(),
        "overlap_step_time_s": overlap_claims(options.pairs),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
