"""Peak memory of one GPU by stage, checkpointing, micro batch and kernels.

python experiments/peak_memory/run.py --out part0.json --part 0 --parts 3

Engines are built one after another in one process, three updates each. DeepSpeed does not give all of an engine's memory
back, so what was allocated before a case is subtracted from its peak.
"""

import argparse
import gc
import itertools
import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hydra import compose, initialize_config_dir

from harness.config import register_schemas, resolve, to_config
from harness.data import open_data
from harness.engines import build_engine
from harness.hf_config import check_limits
from harness.ranks import World, fix_threads, leave

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "model=llama_1b model.config.num_hidden_layers=4 data=synthetic data.seq_len=2048"
GPT2 = "model=gpt2 data=synthetic data.seq_len=1024"
CASES = [
    *(
        f"{LLAMA} zero=stage{stage} checkpointing={mode} batch.global_size={micro}"
        for micro, stage, mode in itertools.product((8, 1), (1, 3, 0, 2), ("none", "full", "selective"))
    ),
    *(
        f"{LLAMA} zero=stage1 batch.global_size=8 {kernels}"
        for kernels in (
            "model.kernels=liger",
            "model.compile=true",
            "model.kernels=liger model.compile=true",
        )
    ),
    f"{GPT2} zero=stage1 batch.global_size=8",
    f"{GPT2} zero=stage1 batch.global_size=8 checkpointing=full",
]


def measure(overrides: str, world: World) -> dict:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = resolve(to_config(compose("config", overrides.split())), world.size, on_gpu=True)
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    torch.cuda.reset_peak_memory_stats()
    assert config.batch.global_size is not None
    for step in range(3):
        targets, batches = data.update_batches(step, config.batch.global_size, config.batch.global_size, 0, 1)
        for input_ids, labels in batches:
            count = torch.tensor(float(targets), device=world.device)
            engine.forward_backward(input_ids.to(world.device), labels.to(world.device), count, last=True)
        engine.step(1e-4)
    return {
        "overrides": overrides,
        "world_size": world.size,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="processes, one per GPU, that share the cases")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    register_schemas()
    world = World.join()
    fix_threads()
    world.init_process_group()
    rows = []
    for case in CASES[arguments.part :: arguments.parts]:
        rows.append(measure(case, world))
        print(rows[-1], flush=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    leave(0)


if __name__ == "__main__":
    main()
