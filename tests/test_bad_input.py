"""A user's mistake gives one line that names key, value, limit and remedy, exit status 1, and no rank starts."""

import os
import socket
from types import SimpleNamespace

import datasets
import pytest

from harness.compose import check_ranks
from harness.config import ConfigError
from harness.main import run_parent
from tests.launched import FORMS, QUICK, Launched

CASES = {
    "+exp=zero9": ["exp/zero9", "zero0, zero1, zero2, zero3"],
    "exp=zero3": ["+exp=zero3"],
    "zero.stge=1": ["zero.stge", "did you mean zero.stage?"],
    "+foo=1": ["foo=1", "no such key"],
    "+data.foo=1": ["data.foo=1", "no such key"],
    "foo=[": ["'['"],
    "optimizer=adam": ["optimizer/adam", "adamw, sgd"],
    "engine=foo": ["engine/foo", "ddp, deepspeed, fsdp"],
    "+exp=ddp zero=stage3": ["zero.stage=3", "engine=ddp", "engine=deepspeed"],
    "engine=fsdp zero.reduce_bucket_size=9": ["zero.reduce_bucket_size=9", "engine=fsdp"],
    "engine=ddp +deepspeed.dump_state=true": ["deepspeed.dump_state=True", "engine=ddp"],
    "engine=fsdp engine.bucket_mb=1": ["engine.bucket_mb=1", "engine=fsdp"],
    "engine=fsdp engine.overlap=false": ["engine.overlap=false", "engine=ddp"],
    "engine.reshard=false": ["engine.reshard=false", "engine=fsdp"],
    "zero.whole_blocks=true": ["zero.whole_blocks=true", "zero.stage=3, not 0"],
    "model.kernels=liger": ["model.kernels=liger", "GPU", "none"],
    "model.kernels=fast": ["model.kernels=fast", "none, liger"],
    "lr.rule=linaer": ["lr.rule=linaer", "none, linear, sqrt"],
    "lr.schedule=cosin": ["lr.schedule=cosin", "constant, linear, cosine"],
    "lr.base=nan": ["lr.base=nan", "finite"],
    "lr.base=abc": ["lr.base=abc"],
    "batch.global_size=33 launch.world_size=2": ["batch.global_size=33", "2 ranks", "32 or 34"],
    "batch.micro_size=5": ["batch.micro_size=5", "32 sequences", "4 or 8"],
    "batch=weak batch.per_rank_size=6 batch.micro_size=4": ["batch.micro_size=4", "3 or 6"],
    "batch=weak batch.global_size=8": ["batch.global_size=8", "batch.per_rank_size", "batch=strong"],
    "batch.global_size=0": ["batch.global_size=0", "at least 1"],
    "precision=fp16": ["precision=fp16", "GPU", "fp32 or bf16"],
    "precision=fp8": ["precision=fp8", "auto, fp32, bf16, fp16"],
    "zero.stage=4": ["zero.stage=4", "0, 1, 2, 3"],
    "zero=3": ["must be a string"],
    "zero.offload_optimizer=true": ["zero.offload_optimizer=true", "2 or 3, not 0"],
    "zero=stage2 zero.offload_params=true": ["zero.offload_params=true", "zero.stage=3, not 2"],
    "+deepspeed.foo=1": ["deepspeed.foo=1", "zero_optimization"],
    "+deepspeed.zero_optimization.foo=1": ["deepspeed.zero_optimization.foo"],
    "+deepspeed.bf16.foo=1": ["deepspeed.bf16.foo"],
    "+deepspeed.bf16.enabled=true": ["bf16.enabled=True", "precision"],
    "+deepspeed.communication_data_type=auto": ["communication_data_type=auto", "Trainer"],
    "+deepspeed.train_batch_size=8": ["train_batch_size=8", "batch.global_size"],
    "+deepspeed.fp16.enabled=true": ["fp16.enabled=True", "precision"],
    "+deepspeed.zero_optimization.stage=1": ["zero_optimization.stage=1", "zero.stage"],
    "data=text": ["data.path", "data=text"],
    "data=text data.path=/nowhere": ["data.path=/nowhere", "no such file"],
    "data=hub": ["data.name", "data.path"],
    "data=hub data.name=json": ["data.name=json", "data.files='*.json'"],
    "data=hub data.path=/nowhere": ["/nowhere", "no such folder"],
    "data=hub data.path=SAVED data.column=body": ["data.column=body", "title, text"],
    "data=hub data.path=SAVED data.split=test": ["data.split=test", "train"],
    "data=hub data.path=SAVED data.column=number": ["data.column=number", "not hold text", "title, text"],
    "data=hub data.path=SAVED data.prompt_column=body": ["data.prompt_column=body", "title, text, number"],
    "data=hub data.path=SAVED data.prompt_column=number": ["data.prompt_column=number", "not hold text", "title, text"],
    "data=hub data.path=SAVED data.prompt_column=text": ["data.prompt_column=text", "data.column"],
    "data=hub data.path=SAVED data.eval_split=test": ["data.eval_split=test", "train, validation"],
    "data=hub data.path=SAVED data.eval_split=train": ["data.eval_split=train", "data.split"],
    "data=hub data.path=SAVED data.eval_split=validation data.eval_samples=0": ["data.eval_samples=0", "drop one"],
    "data=hub data.path=SAVED data.files=x": ["data.files=['x']", "data.name=json"],
    "data=hub data.path=SAVED data.streaming=true": ["data.eval_samples=64", "0 sequences of 128 tokens"],
    "data=hub data.path=SAVED data.streaming=true data.column=body": ["data.column=body", "title, text"],
    "data=hub data.name=json data.files=/nowhere/*.json": ["data.files=/nowhere/*.json", "no such file"],
    "data=hub data.name=json data.files=/etc/hostname data.streaming=true": ["data.split=train", "cannot be read"],
    "data=hub data.name=parquet data.files=EMPTY data.streaming=true": ["data.split=train", "is empty"],
    "data=hub data.name=parquet data.files=EMPTY": ["data.split=train", "no data"],
    "data=hub data.name=parquet data.files=EMPTY data.split=foo": ["data.split=foo", "['train']"],
    "data=hub data.name=parquet data.files=EMPTY data.split=foo data.streaming=true": ["data.split=foo", "['train']"],
    "data=text data.path=/etc/hostname data.streaming=true": ["data.streaming=True", "data=hub", "data=text"],
    "data=text data.path=/etc/hostname data.prompt_column=prompt": [
        "data.prompt_column=prompt",
        "data=hub",
        "data=text",
    ],
    "data.eval_split=test": ["data.eval_split=test", "data=hub", "data=stdlib"],
    "data=text data.path=/etc/hostname": ["0 sequences", "one batch of 32", "data.seq_len"],
    "data.ragged=true": ["data.ragged=true", "data=synthetic"],
    "data.seq_len=4096": ["data.seq_len=4096", "512 positions"],
    "data.tokenizer=/nowhere": ["data.tokenizer=/nowhere", "cannot be loaded"],
    "model.config.vocab_size=100": ["256 tokens", "only 100"],
    "model=hub": ["model.path"],
    "model=hub model.path=/nowhere": ["model.path=/nowhere"],
    "model.dropout=1.5": ["model.dropout=1.5", "[0, 1)"],
    "checkpointing.part=mlp": ["checkpointing.part=mlp", "block, attention"],
    "optimizer.betas=[0.9]": ["optimizer.betas=[0.9]", "two numbers"],
    "train.samples=8": ["train.samples=8", "32 sequences"],
    "launch.world_size=0": ["launch.world_size=0", "at least 1"],
    f"seed={'9' * 400}": ["seed=999", "finite"],
    "data.cache_dir=/etc/passwd/x": ["NotADirectoryError"],
    "model.config.n_positions=abc": ["TypeError"],
    "batch.global_size=2000000000 batch.micro_size=7": ["batch.micro_size=7", "5 or 8"],
    "wandb.project=a/b": ["wandb.project=a/b"],
    "train.resume=/nowhere": ["train.resume=/nowhere", "no checkpoint there"],
    "study=a/b": ["study='a/b'", "folder name"],
    "runs_dir=/proc/nowhere": ["runs_dir=/proc/nowhere", "cannot be written"],
}


@pytest.mark.parametrize("command", CASES)
def test_a_mistake_gives_one_line_before_any_rank_starts(command, tmp_path, monkeypatch, capsys):
    expected_words = CASES[command]
    monkeypatch.chdir(tmp_path)
    if "SAVED" in command:
        rows = datasets.Dataset.from_dict({"title": ["a"], "text": ["b"], "number": [1]})
        datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "saved")
    if "EMPTY" in command:
        datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "empty.parquet")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        places = {"SAVED": tmp_path / "saved", "EMPTY": tmp_path / "empty.parquet"}
        for name, place in places.items():
            command = command.replace(name, str(place))
        run_parent(command.split())
    assert end.value.code == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and printed[0].startswith("error: "), printed
    for expected in expected_words:
        assert expected in printed[0], printed
    assert not os.path.exists(tmp_path / "runs")


def test_more_ranks_than_the_machine_has_gpus_or_memory_for(monkeypatch):
    check_ranks(4, 0)
    check_ranks(2, 2)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16_000_000_000))
    check_ranks(61, 0)
    with pytest.raises(ConfigError, match="start at most 61 ranks"):
        check_ranks(62, 0)
    with pytest.raises(ConfigError, match="world_size=4: this machine shows 2 GPUs"):
        check_ranks(4, 2)


def test_a_mistake_under_a_launcher_is_told_once_and_ends_every_rank(tmp_path):
    launched = Launched([*FORMS["deepspeed"], *QUICK, "launch.world_size=4"], tmp_path)
    assert launched.wait() == 1
    errors = [line for line in launched.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "launch.world_size=4: the launcher started 2 ranks" in errors[0], launched.text()
    assert not os.path.exists(tmp_path / "runs")


def test_what_only_a_rank_can_know_is_a_failed_run_with_one_line(tmp_path):
    launched = Launched([*FORMS["python"], *QUICK, "model.config.n_embd=127"], tmp_path)
    assert launched.wait() == 1
    status = launched.run().read_status()
    assert status["status"] == "failed" and "model=gpt2_tiny: cannot be built" in status["reason"], status
    assert "Traceback" not in launched.text()


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launched = Launched([port if part == "PORT" else part for part in FORMS["deepspeed"]] + QUICK, tmp_path)
        assert launched.wait() == 1
    assert f"error: master_port 127.0.0.1:{port}: in use; choose another with --master_port" in launched.text()
