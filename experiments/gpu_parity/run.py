"""Losses of every stage and engine over the same updates, in one world.

torchrun --nproc_per_node 2 experiments/gpu_parity/run.py --out experiments/gpu_parity/parity.json [OVERRIDE …]
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.inside import Run, forget, join
from harness.ranks import leave

RATE = 1e-4
MODEL = (
    "model=llama_1b model.config.num_hidden_layers=4 model.config.hidden_size=1024 model.config.intermediate_size=2816"
    " data=stdlib data.seq_len=1024 batch.global_size=16"
)
RUNS = {
    **{f"stage {stage}": f"zero=stage{stage}" for stage in range(4)},
    "DDP": "engine=ddp",
    "FSDP2": "engine=fsdp",
    **{f"stage 1, micro batch {micro}": f"zero=stage1 batch.micro_size={micro}" for micro in (4, 2)},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    arguments, overrides = parser.parse_known_args()
    world = join()
    rows = []
    for precision in ("fp32", "bf16"):
        for name, choice in RUNS.items():
            started = time.monotonic()
            run = Run(world, [*MODEL.split(), *choice.split(), f"precision={precision}", *overrides])
            losses = [run.update(step, RATE) for step in range(arguments.steps)]
            rows.append({"name": name, "precision": precision, "losses": [float(loss) for loss in losses]})
            del run
            forget()
            if world.rank == 0:
                first, final = rows[-1]["losses"][0], rows[-1]["losses"][-1]
                print(
                    f"{precision} {name}: {first:.4f} to {final:.4f} in {time.monotonic() - started:.1f} s", flush=True
                )
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    if world.rank == 0:
        compare(rows)
    leave(0)


def compare(rows: list[dict]) -> None:
    """Print by how much each run's losses differ from stage 1's without accumulation, at most."""
    for precision in ("fp32", "bf16"):
        losses = {row["name"]: row["losses"] for row in rows if row["precision"] == precision}
        base = losses.pop("stage 1")
        for name, each in losses.items():
            differences = [abs(a / b - 1) for a, b in zip(each, base, strict=True)]
            print(f"{precision} {name}: {max(differences[:20]):.1e} over 20 updates, {max(differences):.1e} over all")


if __name__ == "__main__":
    main()
