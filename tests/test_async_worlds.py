"""Invariant 5 in real worlds: one worker is bit-identical to sync, and the weights of the emulation are those of a naive
parameter server with one weight copy per worker, in every stage, world and split."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

import harness.server
from harness.asynchrony import compensated_gradient
from harness.checkpoint import Checkpoints
from harness.clock import Clock
from harness.config import AsyncConfig, ConfigError, total_steps
from harness.data import open_data
from harness.delayed import DelayedOptimizer
from harness.engines import build_engine, build_torch_optimizer
from harness.hf_config import check_limits, model_shape
from harness.lr import rate_at
from harness.machine import Machine
from harness.model import build_model
from harness.prediction import predict
from harness.recorder import Recorder
from harness.rundir import job_type
from harness.server import Server
from harness.train import train
from tests.parameter_server import NaiveServer
from tests.worlds import compose, run_world

UPDATES = 50
BATCH = 8
RANDOM_TOKENS = [
    "model.config={vocab_size: 256, n_positions: 16, n_embd: 64, n_layer: 2, n_head: 4}", "data=synthetic",
    "data.seq_len=16", "data.eval_samples=0", f"batch.global_size={BATCH}",
    f"train.steps={UPDATES}",
]  # fmt: skip
CONSTANT_RATE = ["lr.base=0.1", "lr.schedule=constant", "lr.warmup_samples=0"]
OPTIMIZERS = {
    "sgd": ["optimizer=sgd", "optimizer.momentum=0", *CONSTANT_RATE],
    "momentum": ["optimizer=sgd", *CONSTANT_RATE],
    "adamw": ["optimizer=adamw", "lr.base=2e-3", "lr.warmup_samples=80"],
}
EXPONENTIAL = ["parallel=async", "parallel.workers=4", "parallel.clock=exponential"]
GROUPS = [*EXPONENTIAL, "parallel.gradients_per_update=3", "parallel.lr_mode=match_sync", "parallel.drain=drop"]
BOUNDED = ["parallel=async", "parallel.workers=3", "parallel.clock_cv=0.5", "parallel.max_staleness=1"]
OVER_STALENESS = [*EXPONENTIAL, "parallel.remedy=lr_over_staleness", "parallel.speeds=[1,1,1,0.3]"]
COMPENSATED = [*EXPONENTIAL, "parallel.remedy=dc_asgd", "parallel.dc_lambda=2", "parallel.pending_device=cpu"]
ARMS = {"sgd": [BOUNDED, COMPENSATED], "momentum": [EXPONENTIAL, GROUPS], "adamw": [EXPONENTIAL, OVER_STALENESS]}


class Rows(list):
    """In the place of rank 0's leader."""

    def rows(self, rows):
        self.extend(rows)


def run_cases(world, configs):
    """Rows of metrics, final weights and summary of each config, trained as a run trains."""
    return [run_case(world, config) for config in configs]


def run_case(world, config):
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    server, rows = Server(config, world, engine), Rows()
    recorder = Recorder(config, world, rows)
    checkpoints = Checkpoints(config, world, engine, server, data.corpus.fingerprint, Path("unused"))
    train(config, world, data, engine, server, recorder, checkpoints, first=0)
    summary = recorder.summarise(engine, server)
    return list(rows), engine.full_parameters(), summary


def naive_server(config) -> NaiveServer:
    """The same run on a plain parameter server; sync has one worker."""
    data = open_data(config, check_limits(config))
    settings = config.parallel if isinstance(config.parallel, AsyncConfig) else AsyncConfig("async", workers=1)

    def gradient(model, k):
        ids, labels = data.batch(data.indices(k * BATCH, BATCH))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        return [p.grad for p in parameters]

    def rate(staleness, applied):
        base = rate_at(config.lr, applied * BATCH, BATCH, UPDATES * BATCH)
        base *= len(staleness) if settings.lr_mode == "match_sync" else 1
        return base / max(1, sum(staleness) / len(staleness)) if settings.remedy == "lr_over_staleness" else base

    def compensate(gradients, now, pulled):
        return [compensated_gradient(*each, 2.0) for each in zip(gradients, now, pulled, strict=True)]

    return NaiveServer(
        Clock(settings.clock, cv=settings.clock_cv, speeds=tuple(settings.speeds), seed=config.seed),
        settings.workers,
        total_steps(config),
        lambda parameters: plain(build_torch_optimizer(config, list(parameters))),
        settings.gradients_per_update,
        settings.max_staleness,
        settings.drain,
        compensate if settings.remedy == "dc_asgd" else None,
        rate,
        build_model(config, torch.float32).model,
        gradient,
        BATCH,
    ).run()


@pytest.fixture(scope="module")
def naive_servers():
    """One naive server per optimizer and arm, for all stages, worlds and splits."""
    servers: dict[str, NaiveServer] = {}

    def server(config) -> NaiveServer:
        key = str((config.optimizer, config.parallel if config.parallel.kind == "async" else "sync"))
        if key not in servers:
            servers[key] = naive_server(config)
        return servers[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other
    yield server
    torch.set_num_threads(threads)


def plain(optimizer):
    assert not isinstance(optimizer, DelayedOptimizer)
    return optimizer


def distance(weights, model) -> float:
    """The largest relative distance of a tensor."""
    return max(((weights[name] - p.detach()).norm() / p.detach().norm()).item() for name, p in model.named_parameters())


def cases_of(world_size: int) -> list[list[str]]:
    """Each optimizer in each stage, with no accumulation and a two-fold one, which the two worlds take in turns; sync
    last."""
    cases = []
    for (number, kind), stage in itertools.product(enumerate(OPTIMIZERS), range(4)):
        place = [
            f"zero=stage{stage}",
            "zero.sub_group_size=20000",
            f"batch.micro_size={BATCH // world_size // (1, 2)[(number + stage + world_size) % 2]}",
        ]
        cases.append([*RANDOM_TOKENS, *OPTIMIZERS[kind], *place, *ARMS[kind][stage // 2]])
    return cases + [[each for each in case if "parallel" not in each] for case in cases[-4:]]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_weights_equal_those_of_a_naive_parameter_server(world_size, naive_servers):
    cases = cases_of(world_size)
    configs = [compose(*case, world_size=world_size) for case in cases]
    distances = []
    for config, (rows, weights, summary) in zip(configs, run_world(world_size, run_cases, configs)[0], strict=True):
        server = naive_servers(config)
        distances.append(distance(weights, server.model))
        assert (summary["updates"], summary["applied_gradients"]) == (server.updates, server.applied)
        assert [each for row in rows for each in row["staleness"]] == server.staleness
        assert summary["staleness_histogram"] == {str(s): n for s, n in sorted(Counter(server.staleness).items())}
        if config.parallel.kind == "async":
            assert summary["sim_time_s"] == server.now
    sync = distances[-4:]
    for case, far, of_sync in zip(cases[:-4], distances, [0.0] * 8 + sync, strict=False):
        assert far < (3 * of_sync if "optimizer=adamw" in case else 1e-6), (case, far, of_sync)


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_worker_is_bit_identical_to_sync(world_size):
    four_fold = f"batch.micro_size={BATCH // world_size // 4}"
    cases = [
        [*RANDOM_TOKENS, *OPTIMIZERS["adamw"], f"zero=stage{stage}", four_fold, "train.steps=12"] for stage in range(4)
    ]
    one = ["parallel=async", "parallel.workers=1", "parallel.clock=exponential"]
    configs = [compose(*case, *arm, world_size=world_size) for case in cases for arm in ([], one)]
    results = run_world(world_size, run_cases, configs)[0]
    for (rows, weights, summary), (delayed_rows, delayed_weights, delayed_summary) in zip(
        results[::2], results[1::2], strict=True
    ):
        for key in ("loss", "lr", "grad_norm", "updates", "applied_samples", "staleness"):
            assert [row[key] for row in rows] == [row[key] for row in delayed_rows], key
        assert all(torch.equal(weights[name], delayed_weights[name]) for name in weights)
        assert delayed_summary["pending_gradient_bytes"] == 0 and summary["pending_gradient_bytes"] is None
        for key in ("param_bytes", "grad_bytes", "optimizer_bytes", "comm_bytes_per_step", "staleness_histogram"):
            assert summary[key] == delayed_summary[key], key
        assert summary["staleness_mean"] == delayed_summary["staleness_mean"] == 0


def test_a_run_records_what_was_applied_and_holds_back_a_shard():
    workers, steps = 4, 20
    arm = ["parallel=async", f"parallel.workers={workers}", "parallel.clock=exponential", f"train.steps={steps}"]
    base = [*RANDOM_TOKENS, *OPTIMIZERS["adamw"], "lr.schedule=linear"]
    cases = [[f"zero=stage{stage}", *arm] for stage in range(4)]
    cases += [["zero=stage3", *arm, "parallel.drain=drop"], ["zero=stage3", *arm, "precision=bf16"]]
    cases += [["zero=stage2", *arm, "zero.offload_optimizer=true"]]
    results = run_world(2, run_cases, [compose(*base, *case, world_size=2) for case in cases])[0]
    for case, (rows, _, summary) in zip(cases, results, strict=True):
        whole = 4 * summary["n_params"] * (workers - 1)
        shard = whole if "zero=stage0" in case else whole / 2
        assert summary["pending_gradient_bytes"] == pytest.approx(shard, rel=2e-2), case
        config = compose(*base, *case, world_size=2)
        predicted = predict(config, model_shape(config.model), Machine(None, None), job_type(config), 2)
        assert predicted.states.pending == pytest.approx(shard, rel=1e-3), case
        assert [row["samples"] for row in rows] == [BATCH * k for k in range(1, steps + 1)]
        dropped = "parallel.drain=drop" in case
        applied = [0] * (workers - 1) + list(range(1, steps - workers + 2))
        applied[-1] = applied[-1] if dropped else steps
        assert [row["updates"] for row in rows] == applied
        assert [row["applied_samples"] for row in rows] == [BATCH * count for count in applied]
        assert summary["dropped_gradients"] == (workers - 1 if dropped else 0)
        assert summary["drain"] == ("drop" if dropped else "apply")
        staleness = [each for row in rows for each in row["staleness"]]
        assert len(staleness) == summary["applied_gradients"] == summary["updates"] == applied[-1]
        assert sum(staleness) / len(staleness) == summary["staleness_mean"]
        if not dropped:
            assert sum(staleness) == (workers - 1) * (steps - workers // 2)
        assert [row["lr"] is None for row in rows] == [not row["staleness"] for row in rows]
        total = steps * BATCH
        for row in rows[workers - 1 : -1]:
            assert row["lr"] == pytest.approx(
                rate_at(compose(*base, *case, world_size=2).lr, row["applied_samples"] - BATCH, BATCH, total)
            )
        times = [row["sim_time_s"] for row in rows]
        assert times == sorted(times) and times[workers - 2] == 0 and times[-1] == summary["sim_time_s"] > 0
    assert results[0][2]["param_bytes"] == 4 * results[0][2]["n_params"]


def test_the_clock_of_sync_is_that_of_its_slowest_worker():
    clocked = ["parallel.clock=exponential", "parallel.clock_mean_s=0.5", "train.steps=6"]
    arms = {0: 4, 1: 5}  # backup workers, workers that compute
    cases = [[*RANDOM_TOKENS, *clocked, "parallel.workers=4", f"parallel.backup_workers={b}"] for b in arms]
    results = run_world(1, run_cases, [compose(*case) for case in cases])[0]
    clock = Clock("exponential", mean_s=0.5)
    for (rows, _, summary), computing in zip(results, arms.values(), strict=True):
        times = [sorted(clock.seconds(w, k, BATCH / 4) for w in range(computing))[3] for k in range(6)]
        assert [row["sim_time_s"] for row in rows] == pytest.approx([sum(times[: k + 1]) for k in range(6)])
        assert summary["sim_time_s"] == rows[-1]["sim_time_s"]
        assert [row["updates"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in results[0][0]] == [row["loss"] for row in results[1][0]]


def refusal(world, config):
    harness.server.free_memory_bytes = lambda device: 1000
    with pytest.raises(ConfigError) as error:
        run_case(world, config)
    return str(error.value)


def test_pending_gradients_that_do_not_fit_are_refused_before_the_first_update():
    config = compose(*RANDOM_TOKENS, *COMPENSATED, "zero=stage3", world_size=2)
    for message in run_world(2, refusal, config):
        assert message.startswith("parallel.workers=4: pending gradients need") and "DC-ASGD" in message


def test_ddp_and_fsdp_hold_gradients_back_as_deepspeed_does():
    choices = [*RANDOM_TOKENS, *OPTIMIZERS["sgd"], *EXPONENTIAL, "train.steps=20"]
    engines = {"zero=stage1": 2, "engine=ddp": 1, "engine=fsdp": 2}
    configs = [compose(*choices, engine, world_size=2) for engine in engines]
    reference, *others = run_world(2, run_cases, configs)[0]
    gradients = 4 * reference[2]["n_params"]
    for (rows, weights, summary), share in zip([reference, *others], engines.values(), strict=True):
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in reference[0]], rel=1e-6)
        assert all((weights[name] - w).norm() <= 1e-6 * w.norm().clamp_min(1) for name, w in reference[1].items())
        assert summary["pending_gradient_bytes"] == pytest.approx(3 * gradients / share, rel=1e-2)
