"""Invariants 1 to 4: the data, the initial weights and the loss do not depend on how the work is split,
hence synchronous data parallelism equals one big batch."""

import itertools
import math

import pytest
import torch

from harness.config import Config, total_steps
from harness.data import open_data
from harness.engines import build_engine
from harness.hf_config import check_limits
from harness.lr import rate_at
from harness.model import build_model
from harness.train import evaluate
from tests.worlds import compose, run_world

UPDATES = 10
BATCH = 16
TINY = [
    "model.config={vocab_size: 256, n_positions: 64, n_embd: 48, n_layer: 3, n_head: 4, tie_word_embeddings: true}",
    "data.seq_len=32",
    "data.eval_samples=13",
    f"batch.global_size={BATCH}",
    f"train.steps={UPDATES}",
    "lr.warmup_samples=32",
]
SGD = ["optimizer=sgd", "lr.base=0.1"]
RAGGED = ["data=synthetic", "data.ragged=true"]


def plain_loop(config: Config) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """What a textbook PyTorch loop on the whole batch in one process gives: losses, evaluation, weights."""
    data = open_data(config, check_limits(config))
    model = build_model(config, torch.float32).model
    settings = config.optimizer
    if settings.kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=settings.momentum)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )

    def mean_loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    losses = []
    for step in range(total_steps(config)):
        loss = mean_loss(*data.batch(data.indices(step * BATCH, BATCH)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config.lr, step * BATCH, BATCH, total_steps(config) * BATCH)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        evaluation = mean_loss(*data.batch(data.corpus.eval_indices())).item()
    return losses, evaluation, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_loop(world, config):
    """The same through an engine in a real world."""
    data = open_data(config, check_limits(config))
    engine = build_engine(config, world)
    first = engine.full_parameters()
    losses = []
    for step in range(total_steps(config)):
        size, micro = config.batch.global_size, config.batch.micro_size
        targets, batches = data.update_batches(step, size, micro, world.rank, world.size)
        batches = list(batches)
        loss = torch.zeros(())
        for number, (ids, labels) in enumerate(batches):
            loss += engine.forward_backward(ids, labels, torch.tensor(float(targets)), number == len(batches) - 1)
        engine.step(rate_at(config.lr, step * size, size, total_steps(config) * size))
        torch.distributed.all_reduce(loss)
        losses.append(loss.item())
    evaluation, _ = evaluate(config, world, data, engine)
    torch.distributed.all_reduce(evaluation)
    return losses, evaluation.item(), first, engine.full_parameters(), engine.held_bytes(), engine.n_params


def engine_loops(world, configs):
    return [engine_loop(world, config) for config in configs]


def splits(world_size: int) -> list[int]:
    """Micro batch sizes: no accumulation, and four-fold or the most there is."""
    per_rank = BATCH // world_size
    return [per_rank, max(1, per_rank // 4)]


SELECTIVE = [
    "selective",
    "selective checkpointing.part=attention",
    "selective checkpointing.part=attention checkpointing.reentrant=true",
    "full checkpointing.reentrant=true",
]
STAGES = ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"]
NATIVE = ["engine=ddp", "engine=fsdp"]
ENGINES = [*STAGES, *NATIVE]
OPTIONS = [
    ("zero=stage1", "zero.multi_rank_allreduce=false engine.overlap=false"),
    ("zero=stage2", "zero.multi_rank_allreduce=false engine.overlap=false"),
    ("zero=stage2", "zero.offload_optimizer=true"),
    ("zero=stage3", "zero.offload_optimizer=true zero.offload_params=true"),
    ("zero=stage3", "zero.whole_blocks=true"),
    ("engine=ddp", "engine.bucket_mb=0.05 engine.overlap=false"),
    ("engine=fsdp", "engine.reshard=false"),
]
CASES = {
    1: [(engine, splits(1)[number % 2], "none", RAGGED) for number, engine in enumerate(ENGINES)],
    2: [
        *itertools.product(ENGINES, splits(2), ["none"], [RAGGED]),
        *((stage, splits(2)[number % 2], "none", []) for number, stage in enumerate(STAGES)),
        *itertools.product(ENGINES, splits(2)[1:], ["full"], [RAGGED]),
        *itertools.product(["zero=stage0", "zero=stage3", *NATIVE], [2], SELECTIVE, [RAGGED]),
        *((engine, 2, f"none {options}", RAGGED) for engine, options in OPTIONS),
    ],
    4: [*itertools.product(ENGINES, splits(4)[1:], ["none"], [RAGGED])],
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_worlds_engines_stages_and_splits_equal_one_big_batch(world_size):
    cases = CASES[world_size]
    overrides = [
        [
            *TINY,
            *SGD,
            engine,
            f"batch.micro_size={micro}",
            *f"checkpointing={checkpointing}".split(),
            *data,
        ]
        for engine, micro, checkpointing, data in cases
    ]
    references = {name: plain_loop(compose(*TINY, *SGD, *data)) for name, data in (("", []), ("ragged", RAGGED))}
    initial = dict(build_model(compose(*TINY), torch.float32).model.named_parameters())
    configs = [compose(*o, world_size=world_size) for o in overrides]
    results = run_world(world_size, engine_loops, configs)[0]
    assert len(results) == len(cases) >= 6
    for (*case, data), result in zip(cases, results, strict=True):
        losses, evaluation, weights = references["ragged" if data else ""]
        got_losses, got_evaluation, got_initial, got_weights, _, _ = result
        assert got_losses == pytest.approx(losses, rel=1e-5), case
        assert got_evaluation == pytest.approx(evaluation, rel=1e-5), case
        assert got_weights.keys() == got_initial.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(got_initial[name], initial[name]), (case, name)
            distance = (got_weights[name] - weight).norm() / weight.norm().clamp_min(1e-2)
            assert distance < 1e-5, (case, name)
    assert references[""][0][-1] < references[""][0][0] - 0.2


def test_adamw_and_llama_follow_the_plain_loop():
    llama = [
        "model=llama_tiny", "model.config.hidden_size=48", "model.config.num_hidden_layers=2",
        "model.config.intermediate_size=96", *TINY[1:], "lr.base=1e-3",
    ]  # fmt: skip
    references = [plain_loop(compose(*llama, *data)) for data in ([], RAGGED)]
    cases = [*itertools.product(ENGINES, ([], RAGGED))]
    configs = [compose(*llama, engine, "batch.micro_size=4", *data, world_size=2) for engine, data in cases]
    for (engine, data), result in zip(cases, run_world(2, engine_loops, configs)[0], strict=True):
        losses, evaluation, _ = references[1 if data else 0]
        assert result[0] == pytest.approx(losses, rel=1e-5), engine
        assert result[1] == pytest.approx(evaluation, rel=1e-5), engine


def test_another_seed_gives_other_initial_weights():
    one, other = (build_model(compose(*TINY, f"seed={seed}"), torch.float32).model for seed in (0, 1))
    assert not torch.equal(other.transformer.wte.weight, one.transformer.wte.weight)


def test_stages_and_engines_shard_what_they_say():
    """Bytes held by a rank, in fp32: whole without sharding, 1/N of what a stage or an engine shards."""
    held = {}
    for size in (1, 2, 4):
        configs = [compose(*TINY, engine, "train.steps=2", world_size=size) for engine in ENGINES]
        for name, result in zip([0, 1, 2, 3, "ddp", "fsdp"], run_world(size, engine_loops, configs)[0], strict=True):
            held[size, name] = result[4]
            n_params = result[5]
    model = 4 * n_params
    for size in (1, 2, 4):
        for name in (0, "ddp"):
            assert held[size, name] == {"param": model, "grad": model, "optimizer": pytest.approx(2 * model, rel=1e-2)}
        for kind, parts in (("param", 1), ("grad", 1), ("optimizer", 2)):
            assert held[size, "fsdp"][kind] == pytest.approx(parts * model / size, rel=2e-2), (size, kind)
        for stage in (1, 2, 3):
            assert held[size, stage]["optimizer"] == pytest.approx(3 * model / size, rel=2e-2), (size, stage)
        assert held[size, 3]["param"] == pytest.approx(model / size, rel=2e-2), size
        assert held[size, 3]["grad"] == pytest.approx(2 * model / size, rel=2e-2), size


@pytest.mark.parametrize("model", ["gpt2_tiny", "llama_tiny"])
@pytest.mark.parametrize(("data", "tolerance"), [("synthetic", 0.01), ("stdlib", 0.08)])
def test_the_first_loss_is_that_of_guessing(model, data, tolerance):
    config = compose(f"model={model}", f"data={data}")
    corpus = open_data(config, check_limits(config))
    ids, labels = corpus.batch(corpus.indices(0, 32))
    loss = build_model(config, torch.float32)(ids, labels, torch.tensor(corpus.targets(corpus.indices(0, 32))))
    assert loss.item() == pytest.approx(math.log(256), rel=tolerance)
