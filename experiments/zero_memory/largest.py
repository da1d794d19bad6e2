"""The largest model that one GPU trains, by stage and checkpointing: as planned, and tried.

for case in 0 1 2 3 4 5; do for more in 0 1; do
  python experiments/zero_memory/largest.py --case $case --more $more --memory-gb 20 >> OUT.jsonl; done; done

The allocator gives out no more than the memory asked for, so that a large GPU stands for a small one.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.inside import Run, config_of, join
from harness.hf_config import model_shape
from harness.machine import Machine
from harness.prediction import predict
from harness.ranks import leave
from harness.rundir import job_type

CASES = [
    *(f"zero=stage{stage}" for stage in range(4)),
    "zero=stage1 checkpointing=full",
    "zero=stage3 checkpointing=full",
]


def overrides_of(case: str, layers: int) -> list[str]:
    model = f"model=llama_1b model.config.num_hidden_layers={layers} data=synthetic data.seq_len=2048"
    return [*model.split(), *case.split(), "batch.global_size=4"]


def planned_layers(case: str, memory_bytes: float) -> int:
    """The most layers whose predicted peak fits."""
    layers = 0
    while True:
        config = config_of(overrides_of(case, layers + 1), 1)
        machine = Machine.of_device("h200", config.precision)
        if predict(config, model_shape(config.model), machine, job_type(config), 1).memory_bytes > memory_bytes:
            return layers
        layers += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, required=True)
    parser.add_argument("--more", type=int, default=0, help="layers more than planned")
    parser.add_argument("--memory-gb", type=float, default=20.0)
    arguments = parser.parse_args()
    case, limit = CASES[arguments.case], arguments.memory_gb * 1e9
    world = join()
    layers = planned_layers(case, limit) + arguments.more
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    row = {"overrides": case, "memory_gb": arguments.memory_gb, "more": arguments.more, "layers": layers}
    try:
        run = Run(world, overrides_of(case, layers))
        for step in range(3):
            run.update(step, 1e-4)
        torch.cuda.synchronize()
        row |= {"trains": True, "params": run.engine.n_params}
    except torch.cuda.OutOfMemoryError:
        row["trains"] = False
    print(json.dumps(row | {"peak_bytes": torch.cuda.max_memory_allocated()}), flush=True)
    leave(0)


if __name__ == "__main__":
    main()
