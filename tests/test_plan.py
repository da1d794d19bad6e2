import subprocess
import sys
import time
from dataclasses import replace

import pytest
import yaml

from harness import plan
from harness.shape import read_shape
from tests.models import CONF

SHAPE = read_shape(yaml.safe_load((CONF / "model" / "llama_8b.yaml").read_text())["config"], "llama")
WORK = plan.Workload(SHAPE, seq_len=4096, micro_size=1, checkpointing="full")
H200 = plan.Machine.of_device("h200", "bf16", bandwidth=360e9, efficiency=0.5, hop_latency=2e-6)


def test_planning_imports_no_torch():
    code = (
        "import sys, harness.plan, harness.estimators, harness.convergence, harness.measure.noise\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_8b_model_fits_sharded_and_not_replicated():
    h100 = plan.Machine.of_device("h100", "bf16", bandwidth=360e9, efficiency=0.5)
    fits = [plan.predict(WORK, h100, stage, 8).fits for stage in (0, 1, 2, 3)]
    assert fits == [False, True, True, True]
    assert plan.predict(WORK, replace(H200, memory_bytes=None), 0, 8).fits is None
    assert plan.cheapest_stage(WORK, h100, 1) is None
    assert plan.cheapest_stage(WORK, h100, 8) == 1


def test_the_sum_of_the_parts_is_the_prediction():
    p = plan.predict(WORK, H200, 1, 8)
    assert p.states.total == pytest.approx(SHAPE.params * (4 + 12 / 8))
    assert p.memory_bytes == p.states.total + p.activation_bytes
    assert p.comm_bytes_per_step == {"all_reduce": 2 * SHAPE.params, "all_gather": 2 * SHAPE.params / 8}
    assert p.comm_traffic_bytes == 2 * SHAPE.params * 3 * 7 / 8
    assert p.tokens == 8 * 4096
    assert p.days(p.tokens_per_s * 86_400) == pytest.approx(1)


def test_utilisation_is_below_the_efficiency_by_recompute_and_exposed_communication():
    alone = plan.predict(WORK, H200, 3, 1)
    assert alone.exposed_s == 0 and alone.communication_s == 0 and alone.comm_bytes_per_step == {}
    assert 0.5 * 3 / 4 < alone.mfu < 0.5
    assert plan.predict(replace(WORK, checkpointing="none"), H200, 3, 1).mfu == pytest.approx(0.5)
    assert plan.predict(WORK, H200, 3, 4096).mfu < alone.mfu


def test_accumulation_costs_traffic_from_stage_2_on():
    many = replace(WORK, grad_accum_steps=4)
    growth = [
        plan.predict(many, H200, s, 8).comm_traffic_bytes / plan.predict(WORK, H200, s, 8).comm_traffic_bytes
        for s in range(4)
    ]
    assert growth == [1, 1, 3, 4]


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    work = replace(WORK, checkpointing="none")
    size = plan.largest_micro_size(work, H200.memory_bytes, 3, 8)
    assert size > 0
    assert plan.predict(replace(work, micro_size=size), H200, 3, 8).fits
    assert not plan.predict(replace(work, micro_size=size + 1), H200, 3, 8).fits
    assert plan.largest_micro_size(work, H200.memory_bytes, 0, 8) == 0


def test_without_overlap_all_communication_is_exposed():
    p = plan.predict(replace(WORK, overlap=False), H200, 0, 8)
    assert p.exposed_s == p.communication_s > plan.predict(WORK, H200, 0, 8).exposed_s


def test_thousands_of_ranks_take_no_time_to_plan():
    started = time.perf_counter()
    for world_size in range(1, 4097, 64):
        for stage in range(4):
            plan.predict(WORK, H200, stage, world_size)
    assert (time.perf_counter() - started) / 64 < 0.01


def test_unknown_devices_and_precisions_name_the_known():
    with pytest.raises(ValueError, match=r"plan\.device=h300: unknown; choose one of .*h200"):
        plan.Machine.of_device("h300", "bf16", 1e9, 0.5)
    with pytest.raises(ValueError, match="v100-16g has only fp16, fp32"):
        plan.Machine.of_device("v100-16g", "bf16", 1e9, 0.5)
