"""The harness against the bare loop, in alternating runs; and the time from the command to the first update.

python experiments/overhead/run.py --pairs 5 --out experiments/overhead/result.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")


def harness_rate(stage: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [DEEPSPEED, "--num_gpus", "2", str(ROOT / "harness" / "main.py"), f"+exp=zero{stage}",
             f"train.steps={steps}", "data.eval_samples=0", f"runs_dir={folder}"],
            check=True, capture_output=True,
        )  # fmt: skip
        (summary,) = Path(folder).glob("*/*/summary.json")
        return json.loads(summary.read_text())["tokens_per_s"]


def bare_rate(stage: int, steps: int) -> float:
    printed = subprocess.run(
        [DEEPSPEED, "--num_gpus", "2", str(HERE / "bare.py"), "--stage", str(stage), "--steps", str(steps)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    line = next(line for line in printed.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))["tokens_per_s"]


def seconds_to_first_update(command: list[str], point: str = "") -> float:
    """From starting a command, or from a sweep's announcement of a point, to the next line about a first update; the
    command is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = subprocess.Popen(
            [part.replace("FOLDER", folder) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        if point:
            next(line for line in process.stdout if line.startswith(point))
            started = time.monotonic()
        next(line for line in process.stdout if line.startswith("update 1/"))
        seconds = time.monotonic() - started
        process.terminate()
        process.communicate()
        return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result: dict = {"pairs": arguments.pairs, "steps": arguments.steps}
    for stage in (0, 3):
        pairs = []
        for number in range(arguments.pairs):
            order = [harness_rate, bare_rate] if number % 2 else [bare_rate, harness_rate]
            rates = {function.__name__: function(stage, arguments.steps) for function in order}
            pairs.append([rates["harness_rate"], rates["bare_rate"]])
        result[f"stage{stage}"] = {
            "tokens_per_s [harness, bare]": pairs,
            "ratio": spread([harness / bare for harness, bare in pairs]),
        }
        print(stage, result[f"stage{stage}"]["ratio"], flush=True)
    main_py, deepspeed = str(ROOT / "harness" / "main.py"), [DEEPSPEED, "--num_gpus", "2"]
    commands = {
        "bare, deepspeed": [*deepspeed, str(HERE / "bare.py"), "--stage", "3"],
        "harness, deepspeed": [*deepspeed, main_py, "+exp=zero3", "runs_dir=FOLDER"],
        "harness, python": [sys.executable, main_py, "+exp=zero3", "launch.world_size=2", "runs_dir=FOLDER"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    sweep = [*commands["harness, python"], "seed=0,1", "train.steps=2", "-m"]
    times["harness, second point of a sweep"] = []
    for _ in range(arguments.pairs):
        for name, command in commands.items():
            times[name].append(seconds_to_first_update(command))
        times["harness, second point of a sweep"].append(seconds_to_first_update(sweep, "[2/2]"))
    for name, seconds in times.items():
        result[f"seconds to first update: {name}"] = spread(seconds)
        print(name, spread(seconds), flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
