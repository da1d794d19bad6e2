"""Peak memory of a rank and the time of its updates, by stage, checkpointing, micro batch and kernels.

python experiments/peak_memory/run.py --model 337m --out part0.json --part 0 --parts 3
torchrun --nproc_per_node 2 experiments/peak_memory/run.py --model 953m --out OUT.json

Engines are built one after another in one world. DeepSpeed does not give all of an engine's memory back, so what was
allocated before a case is subtracted from its peak.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.inside import Run, forget, join
from harness.measure.steps import StepClock
from harness.ranks import World, leave

LLAMA = "model=llama_1b data=synthetic data.seq_len=2048"
GPT2 = "model=gpt2 data=synthetic data.seq_len=1024"
MODES = ("checkpointing=none", "checkpointing=full", "checkpointing=selective")
CASES = {  # overrides, and the micro batches that are tried on one engine
    "337m": [
        *(
            (f"{LLAMA} model.config.num_hidden_layers=4 zero=stage{stage} {mode}", (1, 8))
            for stage, mode in itertools.product((1, 3, 0, 2), MODES)
        ),
        *(
            (f"{LLAMA} model.config.num_hidden_layers=4 zero=stage1 {kernels}", (8,))
            for kernels in (
                "model.kernels=liger",
                "model.compile=true",
                "model.kernels=liger model.compile=true",
            )
        ),
        (f"{GPT2} zero=stage1", (8,)),
        (f"{GPT2} zero=stage1 checkpointing=full", (8,)),
    ],
    "953m": [
        *((f"{LLAMA} zero=stage{stage} {mode}", (1, 8)) for stage, mode in itertools.product((1, 3, 0, 2), MODES)),
        (f"{LLAMA} zero=stage1 checkpointing=selective checkpointing.part=attention", (1, 8)),
    ],
}
WARMUP, TIMED = 3, 6


def measure(world: World, overrides: str, micro_sizes: tuple[int, ...]) -> list[dict]:
    """One engine, updated with each micro batch; a row for each."""
    forget()
    before = torch.cuda.memory_allocated()
    run = Run(world, [*overrides.split(), f"batch.global_size={max(micro_sizes) * world.size}"])
    clock, rows = StepClock(world.device), []
    for micro in micro_sizes:
        torch.cuda.reset_peak_memory_stats()
        marks = []
        for step in range(WARMUP + TIMED):
            run.update(step, 1e-4, micro * world.size)
            marks.append(clock.mark())
        times = [clock.seconds(*pair) for pair in itertools.pairwise(marks[WARMUP - 1 :])]
        peak, slowest = world.max_over_ranks([torch.cuda.max_memory_allocated() - before, statistics.median(times)])
        rows.append(
            {
                "overrides": f"{overrides} batch.global_size={micro * world.size}",
                "world_size": world.size,
                "peak_memory_bytes": int(peak),
                "step_ms": 1e3 * slowest,
                "how": "run.py",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(CASES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="worlds that share the cases")
    arguments = parser.parse_args()
    world = join()
    rows = []
    for case in CASES[arguments.model][arguments.part :: arguments.parts]:
        rows += measure(world, *case)
        if world.rank == 0:
            print(rows[-1], flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    leave(0)


if __name__ == "__main__":
    main()
