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
sys.path.remove(str(Path(__file__).resolve().parent))

import itertools

import torch
from hydra import compose, initialize_config_dir
from torch.profiler import ProfilerActivity, profile

from harness.config import register_schemas, resolve, to_config
from harness.data import open_data
from harness.engines import build_engine
from harness.hf_config import check_limits
from harness.measure.steps import StepClock
from harness.ranks import World, fix_threads, leave

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


def busy(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, last = 0.0, -1.0
    for start, end in sorted(spans):
        if end > last:
            total += end - max(start, last)
            last = end
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    register_schemas()
    world = World.join()
    fix_threads()
    world.init_process_group()
    with initialize_config_dir(str(Path(__file__).resolve().parents[2] / "conf"), version_base="1.3"):
        config = resolve(to_config(compose("config", overrides)), world.size, on_gpu=True)
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    batch = config.batch
    assert batch.global_size is not None and batch.micro_size is not None
    targets, batches = data.update_batches(0, batch.global_size, batch.micro_size, world.rank, world.size)
    held = [(ids.to(world.device), labels.to(world.device)) for ids, labels in batches]
    count = torch.full((), float(targets), device=world.device)

    def update() -> None:
        for number, (ids, labels) in enumerate(held):
            engine.forward_backward(ids, labels, count, last=number + 1 == len(held))
        engine.step(1e-4)

    for _ in range(WARMUP):
        update()
    clock = StepClock(world.device)
    marks = [clock.mark()]
    for _ in range(TIMED):
        update()
        marks.append(clock.mark())
    times = [clock.seconds(start, end) for start, end in itertools.pairwise(marks)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            update()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in profiled.events():
        annotation = event.name.startswith(("nccl:", "Optimizer.", "FSDP::"))
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    by_kind: dict[str, float] = collections.Counter()
    for name, each in spans.items():
        by_kind[kind_of(name)] += sum(end - start for start, end in each) / PROFILED / 1e3
    everything = [span for each in spans.values() for span in each]
    if world.rank == 0:
        result = {
            "overrides": overrides,
            "step_ms": 1e3 * statistics.median(times),
            "busy_ms": busy(everything) / PROFILED / 1e3,
            "ms by kind": dict(sorted(by_kind.items(), key=lambda pair: -pair[1])),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(result, flush=True)
    torch.distributed.barrier()
    leave(0)


if __name__ == "__main__":
    main()
