"""Configs: groups compose, every shipped option works, and identity follows from what matters."""

import itertools
from pathlib import Path

import pytest

from harness.config import ConfigError, dump, grad_accum_steps, load, resolve, total_steps
from harness.ds_config import build_ds_config
from harness.environment import without_local_rank
from harness.rundir import config_hash, run_name
from tests.launched import ROOT
from tests.worlds import compose

OPTIONS = sorted(
    f"{path.parent.name}={path.stem}" for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "exp"
)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_group_option_composes_and_survives_the_way_to_the_ranks(option):
    needs = {"model=hub": ["model.path=x"], "data=hub": ["data.name=x"], "data=text": ["data.path=x"]}
    config = compose(option, *needs.get(option, []), world_size=2)
    assert load(dump(config)) == config


@pytest.mark.parametrize("exp", sorted(path.stem for path in (ROOT / "conf" / "exp").glob("*.yaml")))
def test_every_exp_composes_and_names_its_command(exp):
    package, command = Path(ROOT / "conf" / "exp" / f"{exp}.yaml").read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert f"+exp={exp}" in command
    compose(f"+exp={exp}", on_gpu=exp.startswith("fast"))


@pytest.mark.parametrize(
    ("world", "global_size", "micro", "accumulation"), [(1, 32, 32, 1), (2, 32, 8, 2), (4, 32, 2, 4)]
)
def test_global_batch_is_micro_times_accumulation_times_ranks(world, global_size, micro, accumulation):
    batch = compose(f"batch.micro_size={micro}", world_size=world).batch
    assert (batch.global_size, grad_accum_steps(batch)) == (global_size, accumulation)
    assert micro * accumulation * world == global_size


def test_weak_batches_grow_with_the_world():
    sizes = [compose("batch=weak", "batch.per_rank_size=6", world_size=w).batch.global_size for w in (1, 2, 4)]
    assert sizes == [6, 12, 24]


def test_the_effective_batch_of_256_gpus():
    batch = compose("batch=weak", "batch.per_rank_size=32", "train.steps=1", world_size=256).batch
    assert batch.global_size == 8192


def test_a_world_size_other_than_the_launchers_is_refused():
    config = compose("launch.world_size=2", world_size=2)
    with pytest.raises(ConfigError, match="launcher started 4 ranks"):
        resolve(config, 4, on_gpu=False)


def test_precision_is_decided_before_anything_is_hashed():
    assert compose().precision == "fp32"
    assert compose(on_gpu=True).precision == "bf16"
    assert config_hash(compose()) == config_hash(compose("precision=fp32"))
    assert config_hash(compose()) != config_hash(compose(on_gpu=True)) == config_hash(compose("precision=bf16"))


def test_steps_replace_samples():
    assert total_steps(compose("train.samples=100")) == 3
    assert total_steps(compose("train.samples=100", "train.steps=7")) == 7


@pytest.mark.parametrize(
    ("override", "matters"),
    [
        ("seed=1", True), ("zero.stage=1", True), ("data.path=[a]", True), ("optimizer.clip_norm=2", True),
        ("study=other", False), ("runs_dir=other", False), ("wandb.mode=disabled", False),
        ("train.log_every=3", False), ("launch.timeout_s=9", False), ("objective=tokens_per_s", False),
    ],
)  # fmt: skip
def test_identity_is_a_hash_of_what_matters(override, matters):
    assert (config_hash(compose()) != config_hash(compose(override))) is matters


def test_the_world_size_counts_and_the_name_tells_it():
    one, two = compose("zero=stage3"), compose("zero=stage3", world_size=2)
    assert config_hash(one) != config_hash(two)
    assert run_name(two) == f"gpt2_tiny-zero3-w2-b32-{config_hash(two)}"


def test_ds_config_follows_the_stage_and_is_fitted_to_the_model():
    n = 891_648
    for stage, precision in itertools.product(range(4), ("fp32", "bf16")):
        built = build_ds_config(compose(f"zero.stage={stage}", f"precision={precision}", world_size=2), n)
        zero = built["zero_optimization"]
        assert zero["stage"] == stage
        assert built["bf16"]["enabled"] is (precision == "bf16")
        assert (built["train_batch_size"], built["train_micro_batch_size_per_gpu"]) == (32, 16)
        assert zero["reduce_bucket_size"] <= n
        if stage == 3:
            assert zero["stage3_param_persistence_threshold"] < 16384  # the smallest matrix is sharded


def test_passthrough_is_merged_last():
    config = compose("zero=stage1", "+deepspeed.zero_optimization.reduce_bucket_size=77", "+deepspeed.dump_state=true")
    built = build_ds_config(config, 1000)
    assert built["zero_optimization"]["reduce_bucket_size"] == 77
    assert built["zero_optimization"]["stage"] == 1
    assert built["dump_state"] is True


def test_bucket_mb_is_in_mebibytes_of_the_gradient_dtype():
    built = build_ds_config(compose("zero=stage1", "engine.bucket_mb=2", "precision=bf16"), 10**9)
    assert built["zero_optimization"]["reduce_bucket_size"] == 2**20


def test_injected_local_rank_is_removed_and_a_key_of_that_name_is_not():
    given = ["--local_rank=1", "+exp=a", "--local_rank", "3", "foo.local_rank=3", "--local-rank=0"]
    assert without_local_rank(given) == ["+exp=a", "foo.local_rank=3"]
