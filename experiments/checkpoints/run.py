"""What a checkpoint of GPT-2 costs, by ZeRO stage: bytes, seconds to write, look through and load, and of going on.

python experiments/checkpoints/run.py --turns 2 --out experiments/checkpoints/result.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.checkpoint_folder import checksum_of, damage_of, find_checkpoints
from harness.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
HALF, BATCH = 2, 2  # updates until the checkpoint, and sequences in one
WORK = [
    "launch.world_size=2", "model=gpt2", "precision=fp32", "data.seq_len=64", "data.eval_samples=0",
    f"batch.global_size={BATCH}", "lr.schedule=constant", "train.log_every=1", "wandb.mode=disabled",
]  # fmt: skip


def seconds(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def train(folder: Path, *overrides: str) -> tuple[RunDir, float]:
    """A run, and the seconds from its command to its end."""
    command = [sys.executable, str(ROOT / "harness" / "main.py"), *WORK, f"runs_dir={folder}", *overrides]
    took = seconds(lambda: subprocess.run(command, check=True, capture_output=True, cwd=folder))
    (path,) = folder.glob("*/*/status.json")
    return RunDir(path.parent), took


def measure(stage: int, whole_first: bool) -> dict:
    """One stage: a run of twice ``HALF`` updates, and the same in two halves."""

    def run_whole() -> tuple[list, float]:
        with tempfile.TemporaryDirectory() as folder:
            run, took = train(Path(folder), f"zero=stage{stage}", f"train.steps={2 * HALF}")
            return curve(run), took

    whole = run_whole() if whole_first else None
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        every = f"train.checkpoint_every={HALF * BATCH}"
        half, half_s = train(Path(first), f"zero=stage{stage}", f"train.steps={HALF}", every)
        (checkpoint,) = find_checkpoints(half.path / "checkpoints")
        files = sorted(checkpoint.glob("rank-*"), key=lambda file: file.stat().st_size)
        result = {
            "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.iterdir()),
            "largest_rank_file_bytes": files[-1].stat().st_size,
            "write_s": half.read_summary()["checkpoint_time_s"],
            "checksum_s": seconds(checksum_of, files[-1]),
            "look_through_s": seconds(damage_of, checkpoint),
        }
        resume = f"train.resume={half.path}"
        rest, rest_s = train(Path(second), f"zero=stage{stage}", f"train.steps={2 * HALF}", resume)
        result |= {"load_s": rest.read_summary()["load_time_s"], "halves_s": [half_s, rest_s]}
        halves = curve(half) + curve(rest)
    whole_curve, result["whole_s"] = whole or run_whole()
    result["overhead_s"] = sum(result["halves_s"]) - result["whole_s"]
    result["same_curve"] = halves == whole_curve and len(halves) == 2 * HALF
    return {"stage": stage, "load_average": load, **result, "losses": [loss for loss, _ in halves]}


def curve(run: RunDir) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in run.read_metrics()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = []
    for turn in range(arguments.turns):
        for stage in range(4):
            results.append({"turn": turn, **measure(stage, whole_first=turn % 2 == 1)})
            print(results[-1], flush=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
