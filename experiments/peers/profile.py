"""Where the time of an update goes on a GPU, by kind of kernel.

torchrun --nproc_per_node 2 experiments/peers/profile.py --out OUT.json +exp=fast model=llama_1b data=synthetic
"""

import argparse
import collections
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.remove(str(Path(__file__).resolve().parent))  # whose profile.py is not Python's

import itertools

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.inside import Run, join
from harness.measure.steps import StepClock
from harness.ranks import leave

WARMUP, TIMED, PROFILED = 6, 12, 2
KINDS = {  # the first whose part of a name is in a kernel's
    "nccl": ("nccl",),
    "attention": ("fmha", "flash", "sdpa", "cudnn::fusion"),
    "gemm": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimizer and foreach": ("multi_tensor", "adam"),
    "triton": ("triton", "liger", "_rms_norm", "_swiglu", "_rope"),
    "copies": ("memcpy", "memset"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other of torch")


def gaps(spans: list[tuple[float, float, str]]) -> list[tuple[float, str, str]]:
    """Lengths of the stretches between sorted intervals that none covers, and what ends and starts there."""
    found, (_, last, before) = [], spans[0]
    for start, end, name in spans:
        if start > last:
            found.append((start - last, before, name))
        if end > last:
            last, before = end, name
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    world = join()
    run = Run(world, overrides)
    for step in range(WARMUP):
        run.update(step, 1e-4)
    clock = StepClock(world.device)
    marks = [clock.mark()]
    for step in range(TIMED):
        run.update(step, 1e-4)
        marks.append(clock.mark())
    times = [clock.seconds(start, end) for start, end in itertools.pairwise(marks)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for step in range(PROFILED):
            run.update(step, 1e-4)
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in profiled.events():
        annotation = event.name.startswith(("nccl:", "Optimizer.", "FSDP::"))
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    by_kind: dict[str, float] = collections.Counter()
    for name, each in spans.items():
        by_kind[kind_of(name)] += sum(end - start for start, end in each) / PROFILED / 1e3
    everything = sorted((*span, name) for name, each in spans.items() for span in each)
    idle = gaps(everything)
    if world.rank == 0:
        result = {
            "overrides": overrides,
            "step_ms": 1e3 * statistics.median(times),
            "idle_ms": sum(length for length, *_ in idle) / PROFILED / 1e3,
            "ms by kind": dict(sorted(by_kind.items(), key=lambda pair: -pair[1])),
            "longest gaps (ms)": [(length / 1e3, *names) for length, *names in sorted(idle, reverse=True)[:20]],
            "ms and number by kernel": sorted(
                (
                    (sum(e - s for s, e in each) / PROFILED / 1e3, len(each) // PROFILED, name[:160])
                    for name, each in spans.items()
                ),
                reverse=True,
            )[:60],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print({key: result[key] for key in ("overrides", "step_ms", "idle_ms", "ms by kind")}, flush=True)
    torch.distributed.barrier()
    leave(0)


if __name__ == "__main__":
    main()
