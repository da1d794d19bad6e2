"""What DeepSpeed's ranks hold and communicate is predicted to 1 %, in real worlds."""

import itertools

import pytest
import torch

from harness.config import grad_accum_steps
from harness.data import open_data
from harness.deepspeed_memory import held_by_deepspeed
from harness.deepspeed_traffic import NORMS, counted_collectives
from harness.ds_config import build_ds_config
from harness.engines import build_engine
from harness.hf_config import check_limits
from harness.measure.traffic import TrafficCounter
from harness.shape import read_shape
from harness.zero3 import Recompute
from tests.worlds import compose, run_world

# Sizes that no number of ranks divides.
ODD = [
    "model.config={vocab_size: 257, n_positions: 33, n_embd: 36, n_layer: 3, n_head: 4, tie_word_embeddings: true}",
    "data=synthetic", "data.seq_len=16", "data.eval_samples=0", "batch.global_size=8", "train.steps=3",
]  # fmt: skip
LLAMA = [
    "model=llama_tiny", "model.config.hidden_size=48", "model.config.num_hidden_layers=3",
    "model.config.intermediate_size=100", *ODD[1:],
]  # fmt: skip
EVEN = [ODD[0].replace("257", "256").replace("33", "64").replace("36", "48"), *ODD[1:]]
STAGES = ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"]
OFFLOADED = [
    "zero=stage2 zero.offload_optimizer=true",
    "zero=stage3 zero.offload_optimizer=true",
    "zero=stage3 zero.offload_optimizer=true zero.offload_params=true",
]
EVERYWHERE = [f"{z} precision={p}" for z, p in itertools.product(STAGES + OFFLOADED, ("fp32", "bf16"))]
SPLIT = [
    *(f"{z} batch.micro_size=1" for z in STAGES),
    "zero=stage2 zero.offload_optimizer=true batch.micro_size=1 precision=bf16",
    "zero=stage1 zero.multi_rank_allreduce=false engine.overlap=false",
    "zero=stage2 zero.multi_rank_allreduce=false batch.micro_size=1 precision=bf16",
    "zero=stage1 zero.reduce_bucket_size=9000",
    "zero=stage2 zero.reduce_bucket_size=9000 zero.multi_rank_allreduce=false",
    "zero=stage3 zero.reduce_bucket_size=9000 zero.max_live_parameters=0 precision=bf16",
    "zero=stage3 zero.max_live_parameters=1000000000 zero.max_reuse_distance=1000000000",
    "zero=stage3 zero.prefetch_bucket_size=0 zero.param_persistence_threshold=0",
    "zero=stage3 zero.sub_group_size=5000",
    "zero=stage3 checkpointing=full",
    "zero=stage3 checkpointing=full checkpointing.reentrant=true",
    "zero=stage3 checkpointing=selective",
    "zero=stage3 checkpointing=selective checkpointing.part=attention",
    "zero=stage3 checkpointing=selective checkpointing.part=attention checkpointing.reentrant=true",
    "zero=stage2 optimizer=sgd",
]
CASES = {
    1: [(ODD, case) for case in EVERYWHERE],
    2: [(ODD, case) for case in EVERYWHERE + SPLIT]
    + [(LLAMA, "zero=stage3"), (LLAMA, "zero=stage1"), (EVEN, "zero=stage3 batch.micro_size=2")],
    4: [(ODD, case) for case in EVERYWHERE] + [(LLAMA, "zero=stage3 batch.micro_size=1")],
}


def measure(world, config):
    """Bytes held at the second update, and bytes and calls of each collective in the third."""
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    for step in range(3):
        traffic = TrafficCounter()
        targets, batches = data.update_batches(
            step, config.batch.global_size, config.batch.micro_size, world.rank, world.size
        )
        batches = list(batches)
        with traffic:
            for number, (ids, labels) in enumerate(batches):
                engine.forward_backward(ids, labels, torch.tensor(float(targets)), number == len(batches) - 1)
            engine.step(1e-3)
    return engine.held_bytes(), traffic.bytes, traffic.calls, engine.n_params


def measure_all(world, configs):
    return [measure(world, config) for config in configs]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_bytes_held_and_communicated_are_predicted(world_size):
    cases = CASES[world_size]
    configs = [compose(*model, *case.split(), world_size=world_size) for model, case in cases]
    by_rank = run_world(world_size, measure_all, configs)
    wrong = []
    for (_, case), config, ranks in zip(cases, configs, zip(*by_rank, strict=True), strict=True):
        shape = read_shape(config.model.config, config.model.family)
        settings = build_ds_config(config, shape.params)["zero_optimization"]
        element_bytes = 4 if config.precision == "fp32" else 2
        accumulation = grad_accum_steps(config.batch)
        assert shape.params == ranks[0][3]
        held = held_by_deepspeed(shape, settings, world_size, element_bytes, accumulation, config.optimizer.kind)
        for kind in ("param", "grad", "optimizer"):
            fullest = max(rank[0][kind] for rank in ranks)
            if fullest != pytest.approx(getattr(held, kind), rel=1e-2):
                wrong.append(f"{case}: {kind} {fullest} bytes, predicted {getattr(held, kind)}")
        c = config.checkpointing
        collectives = counted_collectives(
            shape, settings, world_size, element_bytes, accumulation, Recompute(c.mode, c.every, c.part, c.reentrant)
        )
        _, counted, calls, _ = ranks[0]
        sent, made = {}, {}
        for each in collectives:
            sent[each.operation] = sent.get(each.operation, 0) + each.input(world_size)
            made[each.operation] = made.get(each.operation, 0) + each.calls
        if counted != pytest.approx(sent, rel=1e-2):
            wrong.append(f"{case}: sent {counted}, predicted {sent}")
        if calls != made:
            wrong.append(f"{case}: calls {calls}, predicted {made}")
        extra = sum(each.input(world_size) for each in collectives if each.purpose == NORMS)
        assert extra < 1000
    assert not wrong, "\n".join(wrong)
