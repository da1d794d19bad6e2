"""The arithmetic of measurement, in numbers."""

import pytest
import torch

from harness.data import open_data
from harness.engines import build_engine
from harness.hf_config import check_limits
from harness.measure.memory import unique_bytes
from harness.measure.steps import rates, warmup_steps
from harness.measure.traffic import TrafficCounter, ring_traffic_bytes
from tests.test_equivalence import TINY
from tests.worlds import compose, run_world


@pytest.mark.parametrize(("world_size", "accumulated"), [(1, 1), (4, 1), (4, 8)])
def test_throughput_counts_all_ranks_over_the_slowest_once_and_leaves_out_warm_up(world_size, accumulated):
    """Ten updates of 32 sequences of 100 tokens: five slow ones at the start, then 0.5 s each, one of 1 s."""
    times = [9.0] * 5 + [0.5, 0.5, 0.5, 0.5, 1.0]
    got = rates(times, sequences=32, seq_len=100, world_size=world_size)
    assert got["samples_per_s"] == pytest.approx(5 * 32 / 3)
    assert got["tokens_per_s"] == pytest.approx(5 * 32 * 100 / 3)
    assert got["tokens_per_s_per_rank"] == pytest.approx(5 * 32 * 100 / 3 / world_size)
    assert got["step_time_s_median"] == 0.5
    assert got["step_time_s_p90"] == 1.0


def test_warm_up_is_at_most_half():
    assert [warmup_steps(n) for n in (1, 2, 3, 9, 10, 1000)] == [0, 1, 1, 4, 5, 5]
    assert rates([2.0], 1, 1, 1)["tokens_per_s"] == 0.5


def test_a_storage_is_counted_once():
    whole = torch.zeros(100)
    assert unique_bytes([whole, whole[:50], whole.view(10, 10), torch.zeros(3)]) == 412
    assert unique_bytes([torch.zeros(0)]) == 0


def count_collectives(world):
    a, b = torch.ones(12), torch.ones(12 * world.size)
    with TrafficCounter() as traffic:
        torch.distributed.all_reduce(a)
        torch.distributed.all_gather_into_tensor(b, a)
        torch.distributed.reduce_scatter_tensor(a, b)
        torch.distributed.broadcast(a, 0)
        torch.distributed.reduce(a, 0)
    torch.distributed.all_reduce(a)
    return traffic.bytes, traffic.calls


def test_collectives_are_counted_by_their_input():
    for sent, calls in run_world(2, count_collectives):
        assert sent == {"all_reduce": 48, "all_gather": 48, "reduce_scatter": 96, "broadcast": 48, "reduce": 48}
        assert set(calls.values()) == {1}


def count_update(world, config):
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    for step in range(3):
        targets, batches = data.update_batches(step, 16, config.batch.micro_size, world.rank, world.size)
        batches = list(batches)
        with TrafficCounter() as traffic:
            for number, (ids, labels) in enumerate(batches):
                engine.forward_backward(ids, labels, torch.tensor(float(targets)), number == len(batches) - 1)
            engine.step(0.01)
    n_blocks = sum(p.numel() for n, p in engine.loss_model.model.named_parameters() if ".h." in n)
    return traffic.bytes, 4 * engine.n_params, 4 * n_blocks


@pytest.mark.parametrize("micro", [8, 2])
def test_ddp_sends_each_gradient_once_and_fsdp_gathers_in_every_micro_batch(micro):
    accumulation = 8 // micro
    for options in ("engine=ddp", "engine=ddp engine.overlap=false", "engine=ddp engine.bucket_mb=0.1"):
        config = compose(*TINY, *options.split(), f"batch.micro_size={micro}", world_size=2)
        for sent, model, _ in run_world(2, count_update, config):
            assert sent == {"all_reduce": model}, options
    config = compose(*TINY, "engine=fsdp", f"batch.micro_size={micro}", world_size=2)
    for sent, model, blocks in run_world(2, count_update, config):
        assert sent["all_gather"] == pytest.approx(accumulation * (model + blocks) / 2, rel=1e-2)
        assert sent["reduce_scatter"] == pytest.approx(model, rel=1e-2)
        assert sent["all_reduce"] == 4  # the norm


def test_ring_factors():
    sent = {"all_reduce": 800, "reduce_scatter": 800, "all_gather": 100, "reduce": 80, "all_to_all": 8}
    assert ring_traffic_bytes(sent, 8) == 1400 + 700 + 700 + 70 + 7
    assert ring_traffic_bytes(sent, 1) == 0
