"""Step time with 8 asynchronous workers against sync, in alternating runs, stages 0 and 3.

python experiments/async/step_time.py --pairs 5 --out experiments/async/step_time.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARMS = {"sync": ["parallel=sync"], "async": ["parallel=async", "parallel.workers=8"]}


def step_time_s(arm: str, stage: int, ranks: int, steps: int) -> float:
    """Median step time of a run, warm-up left out."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(ROOT / "harness" / "main.py"), f"+exp=zero{stage}", *ARMS[arm],
             f"launch.world_size={ranks}", f"train.steps={steps}", "data.eval_samples=0", "wandb.mode=disabled",
             f"runs_dir={folder}"],
            check=True, capture_output=True,
        )  # fmt: skip
        (summary,) = Path(folder).glob("*/*/summary.json")
        return json.loads(summary.read_text())["step_time_s_median"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict = {"pairs": arguments.pairs, "steps": arguments.steps, "ranks": arguments.ranks}
    for stage in (0, 3):
        pairs = []
        for number in range(arguments.pairs):
            order = list(ARMS) if number % 2 else list(ARMS)[::-1]
            pairs.append({arm: step_time_s(arm, stage, arguments.ranks, arguments.steps) for arm in order})
        ratios = [pair["async"] / pair["sync"] for pair in pairs]
        spread = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        result[f"stage{stage}"] = {"step_time_s": pairs, "async / sync": spread}
        print(stage, spread, flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
