"""Step time with 8 asynchronous workers against sync, stages 0 and 3, on the main job.

torchrun --nproc_per_node 1 experiments/async/step_time.py --out experiments/async/step_time.json

Both engines live in the same ranks and take turns, update by update on the same batch, so that whatever else the
machine does slows down both. The ratio is that of the two updates of a turn, warm-up left out.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.remove(str(Path(__file__).resolve().parent))

import torch

from experiments.inside import Run, join
from harness.measure.hardware import describe_environment
from harness.measure.steps import StepClock
from harness.ranks import World, leave
from harness.server import Server

ARMS = {"sync": ["parallel=sync"], "async": ["parallel=async", "parallel.workers=8"]}
WARMUP = 12  # the pool of 8 workers is full after 7


class Arm(Run):
    """One engine with its server, and how long its updates took."""

    def __init__(self, overrides: list[str], world: World):
        super().__init__(world, overrides)
        self.server = Server(self.config, world, self.engine)
        self.clock = StepClock(world.device)
        self.step_times_s: list[float] = []

    def turn(self, step: int) -> None:
        batch, world = self.config.batch, self.world
        assert batch.global_size is not None and batch.micro_size is not None
        torch.distributed.barrier()
        start = self.clock.mark()
        targets, batches = self.data.update_batches(step, batch.global_size, batch.micro_size, world.rank, world.size)
        targets_on_device = torch.tensor(float(targets), device=world.device)
        for input_ids, labels in batches:
            self.engine.forward_backward(
                input_ids.to(world.device), labels.to(world.device), targets_on_device, last=True
            )
        self.engine.step(self.server.begin_update(last=False))
        self.server.end_update()
        self.step_times_s.append(self.clock.seconds(start, self.clock.mark()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    world = join()
    started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    result: dict = {"ranks": world.size, "steps": arguments.steps, "started_utc": started}
    result |= {"load_average": os.getloadavg()[0], **describe_environment("")}
    for stage in (0, 3):
        arms = {
            name: Arm([f"zero=stage{stage}", f"train.steps={arguments.steps}", *overrides], world)
            for name, overrides in ARMS.items()
        }
        for step in range(arguments.steps):
            for name in list(ARMS)[:: 1 if step % 2 else -1]:
                arms[name].turn(step)
        slowest = {name: world.max_over_ranks(arm.step_times_s)[WARMUP:] for name, arm in arms.items()}
        ratios = [a / s for a, s in zip(slowest["async"], slowest["sync"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        result[f"stage{stage}"] = {
            "median step_time_s": {name: statistics.median(times) for name, times in slowest.items()},
            "async / sync": {"quartile": low, "median": median, "upper quartile": high},
            "pending_gradient_bytes": arms["async"].server.pending_gradient_bytes,
        }
        if world.rank == 0:
            print(stage, result[f"stage{stage}"], flush=True)
    if world.rank == 0:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.barrier()
    leave(0)


if __name__ == "__main__":
    main()
