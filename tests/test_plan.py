"""A run on paper: same overrides, no rank, no weights, in seconds."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.config import ConfigError
from harness.hf_config import model_shape
from harness.machine import Machine
from harness.plan import make_plan
from harness.plan_page import print_plan, to_dict
from harness.prediction import KINDS, predict
from harness.scenario import plan_world
from tests.launched import ROOT
from tests.worlds import compose

LLAMA = ["model=llama_8b", "data.seq_len=4096", "batch.global_size=512", "batch.micro_size=1", "checkpointing=full"]
H200 = Machine.of_device("h200", "bf16")
H100 = Machine.of_device("h100", "bf16")


@pytest.fixture(scope="module")
def llama():
    config = compose(*LLAMA, on_gpu=True)
    return config, model_shape(config.model)


def by_kind(config, shape, machine, world_size):
    return {row.prediction.kind: row for row in plan_world(config, shape, machine, world_size).rows}


def unresolved(config):
    """The config as composed: its batch is divided anew by each world."""
    return replace(config, batch=replace(config.batch, per_rank_size=None))


def test_an_8b_model_fits_sharded_and_not_replicated(llama):
    config, shape = unresolved(llama[0]), llama[1]
    rows = by_kind(config, shape, H100, 8)
    assert tuple(rows) == KINDS
    fits = {kind: row.prediction.fits for kind, row in rows.items()}
    assert fits == {"zero0": False, "zero1": True, "zero2": True, "zero3": True, "ddp": False, "fsdp": True}
    assert plan_world(config, shape, H100, 1).cheapest is None
    assert plan_world(config, shape, H100, 8).cheapest == "zero1"
    unknown = by_kind(config, shape, replace(H100, memory_bytes=None), 8)
    assert unknown["zero0"].prediction.fits is None and unknown["zero0"].largest_micro_size is None


def test_the_largest_micro_batch_fits_and_the_next_does_not(llama):
    config, shape = llama
    for kind, row in by_kind(unresolved(config), shape, H200, 8).items():
        for micro, fits in ((row.largest_micro_size, True), (row.largest_micro_size + 1, False)):
            if micro > 0:
                prediction = predict(with_batch(config, 8, micro, 2), shape, H200, kind, 8)
                assert prediction.fits is fits, (kind, micro)


def test_accumulation_costs_traffic_from_stage_2_on(llama):
    config, shape = llama
    once, four = (
        {kind: predict(with_batch(config, 8, 1, g), shape, H200, kind, 8).comm_traffic_bytes for kind in KINDS}
        for g in (1, 4)
    )
    growth = {kind: four[kind] / once[kind] for kind in KINDS}
    assert growth["zero0"] == growth["ddp"] == pytest.approx(1)
    assert growth["zero1"] == pytest.approx(1)
    assert growth["zero2"] == pytest.approx(3, rel=1e-3)
    assert growth["zero3"] == pytest.approx(4, rel=1e-2)
    assert 2 < growth["fsdp"] < 3  # gathers four times as often, reduces once


def with_batch(config, ranks, micro, accumulation):
    per_rank = micro * accumulation
    batch = replace(config.batch, global_size=ranks * per_rank, per_rank_size=per_rank, micro_size=micro)
    return replace(config, batch=batch)


def test_utilisation_is_below_the_efficiency_by_recompute_and_exposed_communication(llama):
    config, shape = llama
    alone = predict(with_batch(config, 1, 1, 1), shape, H200, "zero3", 1)
    assert alone.exposed_s == 0 and alone.communication_s == 0 and alone.comm_traffic_bytes == 0
    assert 0.5 * 3 / 4 < alone.mfu < 0.5
    many = predict(with_batch(config, 4096, 1, 1), shape, H200, "zero3", 4096)
    assert many.mfu < alone.mfu
    assert many.days(many.tokens_per_s * 86_400) == pytest.approx(1)


def test_without_overlap_all_communication_is_exposed(llama):
    config, shape = llama
    config = replace(with_batch(config, 8, 1, 1), engine=replace(config.engine, overlap=False))
    for kind in KINDS:
        prediction = predict(config, shape, H200, kind, 8)
        assert prediction.exposed_s == pytest.approx(prediction.communication_s)


def test_an_unmeasured_machine_has_no_times_and_no_utilisation(llama):
    config, shape = llama
    prediction = predict(with_batch(config, 8, 1, 1), shape, Machine(None, None), "zero3", 8)
    assert prediction.step_time_s is prediction.tokens_per_s is prediction.mfu is prediction.fits is None
    assert prediction.memory_bytes > 0 and prediction.comm_traffic_bytes > 0


def test_each_further_world_takes_no_time(llama):
    config, shape = unresolved(llama[0]), llama[1]
    plan_world(config, shape, H200, 2)
    started = time.perf_counter()
    for world_size in range(1, 4097, 128):
        plan_world(config, shape, H200, world_size)
    assert (time.perf_counter() - started) / 32 < 0.01


def test_a_world_that_does_not_divide_the_batch_says_what_it_assumes():
    config = compose("batch.global_size=32", "batch.micro_size=4")
    shape = model_shape(config.model)
    plan = plan_world(unresolved(config), shape, H200, 64)
    assert "global_size=32 does not divide over 64 ranks: assumes 4 per rank" in plan.assumed
    assert plan.rows[0].batch.global_size == 256 and plan.rows[0].prediction.tokens == 256 * 128
    assert not plan_world(unresolved(config), shape, H200, 8).assumed


def run_plan(*arguments):
    command = [sys.executable, "-m", "harness.plan", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - started


def test_from_the_shell_in_seconds_as_tables_and_as_json():
    done, seconds = run_plan("+exp=zero3", "model=llama_1b", "plan.device=h200", "plan.tokens=1e11")
    assert done.returncode == 0, done.stderr
    assert seconds < 6
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    for text in (
        "1 rank:",
        "8 ranks:",
        "64 ranks:",
        "4096 ranks:",
        "ZeRO-3",
        "DDP",
        "FSDP2",
        "What this plan does not know",
    ):
        assert any(text in line for line in lines), text
    done, _ = run_plan("plan.device=a100-80g", "plan.world_sizes=[1,3]", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [world["world_size"] for world in plan["worlds"]] == [1, 3]
    assert plan["worlds"][0]["assumed"] is None and "does not divide" in plan["worlds"][1]["assumed"]
    row = plan["worlds"][1]["rows"][3]
    assert row["kind"] == "zero3" and row["fits"] is True
    assert row["state_bytes_by_convention"]["paper"] == pytest.approx(16 * plan["n_params"] / 3)
    assert set(row) >= {"param_bytes", "comm_bytes_per_step", "exposed_s", "tokens_per_s", "mfu", "days"}
    assert plan["unknown"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.device=h300"], "plan.device=h300: unknown; choose one of b200, h200"),
        (["plan.device=v100-16g", "precision=bf16"], "v100-16g has only fp16, fp32"),
        (["plan.world_sizes=[0]"], "plan.world_sizes=0"),
        (["data.seq_len=1000000"], "data.seq_len=1000000: longer than"),
        (["-m", "zero=stage1,stage2"], "-m: a plan is one"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message):
    done, _ = run_plan(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_ranks_of_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr("harness.plan.visible_gpus", lambda: 0)
    monkeypatch.setattr("harness.plan.psutil.virtual_memory", lambda: SimpleNamespace(total=25e9))
    plan = make_plan(compose("model=llama_1b", "data.seq_len=512", "batch.global_size=16", "plan.world_sizes=[1,2]"))
    for world in plan.worlds:
        prediction = world.rows[0].prediction
        assert prediction.device_memory_bytes == 25e9 / world.world_size
        assert prediction.fits is (prediction.memory_bytes <= 25e9 / world.world_size)


def test_asynchronous_columns_fit_in_a_line(capsys):
    print_plan(make_plan(compose("+exp=async", "parallel.workers=4", "plan.world_sizes=[2]", "plan.device=h200")))
    out = capsys.readouterr().out
    assert "pending" in out and "…" not in out


def test_planning_imports_no_torch():
    code = (
        "import sys, harness.plan, harness.plan_page, harness.estimators, harness.convergence, harness.calibration\n"
        "from tests.worlds import compose\n"
        "harness.plan.make_plan(compose('plan.device=h200'))\n"
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=ROOT).returncode == 0


def test_a_plan_of_a_tiny_model_prints(capsys):
    print_plan(make_plan(compose("plan.device=t4", "precision=fp16", on_gpu=True)))
    assert "t4" in capsys.readouterr().out


def test_a_mixture_of_experts_is_refused_in_one_line():
    config = compose("model=llama_tiny", "+model.config.num_local_experts=8")
    with pytest.raises(ConfigError, match="mixture"):
        model_shape(replace(config.model, family="mixtral"))


def test_what_asynchronous_workers_hold_back_is_in_the_plan(capsys):
    command = ["model=gpt2", "plan.device=h200", "plan.world_sizes=[1,8]"]
    arms = {workers: ["parallel=async", f"parallel.workers={workers}"] for workers in (1, 8)}
    plans = {workers: make_plan(compose(*command, *arm, on_gpu=True)) for workers, arm in arms.items()}
    alone, eight = (
        {(w["world_size"], r["kind"]): r for w in to_dict(plans[workers])["worlds"] for r in w["rows"]}
        for workers in (1, 8)
    )
    for (ranks, kind), row in eight.items():
        pending = 7 * 4 * 124_439_808 / (1 if kind in ("zero0", "ddp") else ranks)
        assert row["pending_gradient_bytes"] == pytest.approx(pending, rel=1e-6)
        assert alone[ranks, kind]["pending_gradient_bytes"] == 0
        more = row["peak_memory_bytes"] - alone[ranks, kind]["peak_memory_bytes"]
        assert more == pytest.approx(pending, rel=1e-6)
    for workers, shown in ((8, True), (1, False)):
        print_plan(plans[workers])
        assert ("pending" in capsys.readouterr().out) is shown
