"""Models: pretrained weights arrive whole in every stage, ZeRO-3 never holds the whole model, precisions train."""

import unittest.mock
from contextlib import nullcontext
from functools import partial

import deepspeed
import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from harness.config import ConfigError
from harness.data import open_data
from harness.engines import build_engine
from harness.engines.deepspeed import DeepSpeedEngine
from harness.engines.fsdp import FSDPEngine
from harness.hf_config import check_limits
from harness.measure.traffic import TrafficCounter
from harness.model import blocks, build_model, units
from tests.test_equivalence import ENGINES, RAGGED, SGD, TINY, engine_loops
from tests.worlds import compose, run_world

LLAMA = ["model=llama_tiny", "model.config.hidden_size=48", "model.config.intermediate_size=96", "data.seq_len=32"]


def first_weights(world, configs):
    return [build_engine(config, world).full_parameters() for config in configs]


def test_pretrained_weights_arrive_whole_in_every_stage(tmp_path):
    settings = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=2, n_head=4)
    whole = transformers.GPT2LMHeadModel(settings)
    whole.save_pretrained(tmp_path / "with_head")
    whole.transformer.save_pretrained(tmp_path / "without_head")
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    folders = ["with_head", "without_head", "sharded"]
    configs = [
        compose("model=hub", f"model.path={tmp_path / folder}", "data.seq_len=32", f"zero=stage{stage}", world_size=2)
        for folder in folders
        for stage in (0, 3)
    ]
    saved = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for weights in run_world(2, first_weights, configs)[0]:
        assert weights.keys() == saved.keys()
        for name, weight in saved.items():
            assert torch.equal(weights[name], weight), name


def test_weights_missing_from_a_checkpoint_are_refused(tmp_path):
    settings = transformers.LlamaConfig(
        vocab_size=256, max_position_embeddings=64, hidden_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaModel(settings).save_pretrained(tmp_path)
    config = compose("model=hub", f"model.path={tmp_path}", "data.seq_len=32")
    with pytest.raises(ConfigError, match=r"holds no weights for lm_head\.weight"):
        build_model(config, torch.float32)


def most_held_while_building(world, config):
    """The most parameter bytes a rank holds at once while ZeRO-3 builds the model, and the bytes of the largest unit."""
    most = 0
    partition = DeepSpeedEngine._partition

    def watched(engine, unit):
        nonlocal most
        held = sum(p.numel() for p in engine.parameters_seen) + sum(p.numel() for p in unit.parameters())
        most = max(most, held)
        partition(engine, unit)
        engine.parameters_seen += [p.ds_tensor for p in unit.parameters()]

    DeepSpeedEngine._partition, DeepSpeedEngine.parameters_seen = watched, []
    engine = build_engine(config, world)
    model = build_model(config, torch.float32).model
    largest = max(sum(p.numel() for p in unit.parameters()) for _, unit in units(model))
    return most, largest, engine.n_params


def whole_weights_while_sharding(world, config):
    """Whole parameters on a rank whenever FSDP2 has just sharded a block, without those outside blocks."""
    whole = []
    shard = FSDPEngine._shard

    def watched(engine, unit):
        shard(engine, unit)
        engine.seen.append(unit)
        whole.append(sum(p.numel() for seen in engine.seen for p in seen.parameters() if not isinstance(p, DTensor)))

    FSDPEngine._shard, FSDPEngine.seen = watched, []
    engine = build_engine(config, world)
    outside = sum(p.numel() for name, p in engine.module.named_parameters() if ".layers." not in name)
    return whole, outside, engine.n_params


def test_fsdp_shards_each_block_before_the_next_is_made():
    config = compose(*LLAMA, "engine=fsdp", "model.config.num_hidden_layers=12", world_size=2)
    for whole, outside, n_params in run_world(2, whole_weights_while_sharding, config):
        assert len(whole) > 12 and max(whole) <= outside < 0.2 * n_params


def test_compiled_blocks_compute_the_same_in_every_engine():
    engines = ["zero=stage1", "zero=stage3", "engine=ddp", "engine=fsdp"]
    choices = [*TINY, *SGD, *RAGGED, "train.steps=3"]
    plain = compose(*choices, "engine=ddp", world_size=2)
    configs = [compose(*choices, engine, "model.compile=true", world_size=2) for engine in engines]
    reference, *compiled = run_world(2, eagerly_compiled_loops, [plain, *configs])[0]
    for engine, (losses, graphs) in zip(engines, compiled, strict=True):
        assert graphs == 2, engine  # one to train, one to evaluate: blocks share them, and no hook breaks them
        assert losses == pytest.approx(reference[0], rel=1e-5), engine


def eagerly_compiled_loops(world, configs):
    """Losses and how many graphs were captured, with the captured graphs run as they are: no compiler is needed."""
    results = []
    for config in configs:
        graphs = []

        def backend(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        with unittest.mock.patch("torch.compile", partial(torch.compile, backend=backend)):
            losses = engine_loops(world, [config])[0][0]
        results.append((losses, len(graphs)))
    return results


def test_compiled_blocks_stay_compiled_while_collectives_are_counted():
    calls = []

    def backend(graph, _):
        return lambda *inputs: calls.append(1) or graph.forward(*inputs)

    torch.compiler.reset()
    with unittest.mock.patch("torch.compile", partial(torch.compile, backend=backend)):
        model = build_model(compose(*TINY, "model.compile=true"), torch.float32)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    for each in (nullcontext(), TrafficCounter(), nullcontext()):
        calls.clear()
        with each:
            model(ids, ids, torch.tensor(7.0))
        assert len(calls) == len(blocks(model))


def test_no_rank_ever_holds_the_whole_model_under_stage_3():
    config = compose(*LLAMA, "zero=stage3", "model.config.num_hidden_layers=12", world_size=2)
    for most, largest, n_params in run_world(2, most_held_while_building, config):
        assert most <= n_params / 2 * 1.02 + largest < 0.7 * n_params


def test_bf16_trains_alike_in_every_stage_and_engine():
    configs = [
        compose(*TINY, "precision=bf16", engine, "lr.base=3e-3", "train.steps=20", world_size=2) for engine in ENGINES
    ]
    results = run_world(2, engine_loops, configs)[0]
    for engine, (losses, *_) in zip(ENGINES, results, strict=True):
        assert losses[-1] < losses[0] - 0.5
        assert losses == pytest.approx(results[0][0], rel=1e-3), engine
    n = results[0][5]
    held = [result[4] for result in results]
    assert [round(h["param"] / n, 1) for h in held] == [2.0, 2.0, 2.0, 1.0, 4.0, 2.0]
    assert [round(h["optimizer"] / n) for h in held] == [12, 6, 6, 6, 8, 4]


def exact_masters(world, configs):
    """Whether the fp32 master weights of each config are the initial weights before rounding."""
    equal = []
    for config in configs:
        engine = build_engine(config, world)
        weights = dict(build_model(config, torch.float32).named_parameters())
        masters = engine._unsharded_masters() if config.zero.stage == 0 else None
        for name, parameter in engine.engine.module.named_parameters():
            master = masters[parameter] if masters else deepspeed.utils.safe_get_full_fp32_param(parameter)
            equal.append(torch.equal(master.cpu(), weights[name]))
    return equal


def test_master_weights_start_exact():
    configs = [compose(*TINY, "precision=bf16", f"zero=stage{stage}", world_size=2) for stage in range(4)]
    for equal in run_world(2, exact_masters, configs):
        assert len(equal) > 100 and all(equal)


def test_dropout_is_off_by_default_also_in_pretrained_configs(tmp_path):
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=1, n_head=4)
    ).save_pretrained(tmp_path)
    model = build_model(compose("model=hub", f"model.path={tmp_path}", "data.seq_len=32"), torch.float32)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    model = build_model(
        compose("model=hub", f"model.path={tmp_path}", "data.seq_len=32", "model.dropout=0.2"), torch.float32
    )
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.2}


def test_checkpointing_reaches_the_blocks_it_says():
    flags = {}
    for mode in ("none", "full", "selective"):
        model = build_model(compose(f"checkpointing={mode}"), torch.float32)
        flags[mode] = [block.gradient_checkpointing for block in blocks(model)]
    assert flags == {"none": [False] * 4, "full": [True] * 4, "selective": [True, False, True, False]}


def test_shipped_models_have_the_size_they_say():
    sizes = {}
    for name in ("gpt2_tiny", "llama_tiny", "gpt2", "llama_1b", "llama_8b"):
        config = compose(f"model={name}")
        from harness.model import meta_model

        sizes[name] = sum(p.numel() for p in meta_model(config).parameters())
        assert check_limits(config) >= 256
    assert sizes == {
        "gpt2_tiny": 891_648, "llama_tiny": 791_680, "gpt2": 124_439_808, "llama_1b": 953_223_168,
        "llama_8b": 8_030_261_248,
    }  # fmt: skip


def test_a_resolved_run_opens_the_same_data_for_every_model():
    ids = [open_data(compose(f"model={name}"), 256).batch([3])[0] for name in ("gpt2_tiny", "llama_tiny")]
    assert torch.equal(*ids)
