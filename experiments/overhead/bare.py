"""A bare DeepSpeed loop on the work of the main job, with nothing of the harness in its updates.

deepspeed --num_gpus 2 experiments/overhead/bare.py --stage 3 --steps 60

Model, data, weights and DeepSpeed config are the harness's own; the loop is written out plainly: fetch, forward,
backward, step, a clock around all of it, and nothing else. Rank 0 prints one JSON line.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.remove(str(Path(__file__).resolve().parent))

import deepspeed
import torch
from hydra import compose, initialize_config_dir

from harness.config import register_schemas, resolve, to_config
from harness.data import open_data
from harness.ds_config import build_ds_config
from harness.model import build_model

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
register_schemas()
with initialize_config_dir(str(Path(__file__).resolve().parents[2] / "conf"), version_base="1.3"):
    composed = compose("config", [f"zero=stage{arguments.stage}", f"train.steps={arguments.steps}"])
config = resolve(to_config(composed), world, on_gpu=False)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model = build_model(config, torch.float32)
settings = build_ds_config(config, sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
data = open_data(config, 256)
size, micro = 32, 32 // world
times = []
for step in range(arguments.steps):
    started = time.perf_counter()
    indices = data.indices(step * size, size)[rank * micro : (rank + 1) * micro]
    input_ids, labels = data.batch(indices)
    loss = engine(input_ids, labels, torch.tensor(micro * 127.0))
    engine.backward(loss)
    engine.step()
    times.append(time.perf_counter() - started)
    if step == 0 and rank == 0:
        print(f"update 1/{arguments.steps}", flush=True)
slowest = torch.tensor(times)
torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
if rank == 0:
    counted = slowest[5:]
    with contextlib.suppress(BrokenPipeError):
        print("RESULT " + json.dumps({"tokens_per_s": len(counted) * size * 128 / counted.sum().item()}), flush=True)
torch.distributed.barrier()
os._exit(0)
