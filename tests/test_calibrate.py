"""A machine measures itself, and plans and records use what it found."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from harness import calibration
from harness.calibration import Calibration
from harness.collective import CollectiveTable
from harness.config import PlanConfig
from harness.machine import Machine, ProductRates
from harness.traffic import OPERATIONS, Collective
from tests.launched import ROOT

PRODUCTS = {"fp32": ProductRates((64, 256), (1e9, 3e9))}
TABLES = tuple(CollectiveTable(op, 2, (1e3, 1e6), (1e-3, 2e-3)) for op in ("all_reduce", "all_gather"))


def made(**changes):
    values = {
        "host": "here", "device": "a CPU", "on_gpu": False, "world_size": 2, "date": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.13.0"}, "products": PRODUCTS, "collectives": TABLES,
    }  # fmt: skip
    return Calibration(**{**values, **changes})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration.socket, "gethostname", lambda: "here")


def test_a_calibration_is_kept_and_read_back():
    path = calibration.save(made())
    assert calibration.load_all() == [made()]
    calibration.save(made(date="2026-02-01T00:00:00+00:00"))
    assert [each.date[:10] for each in calibration.load_all()] == ["2026-02-01"]
    calibration.save(made(host="elsewhere"))
    (path.parent / "damaged.json").write_text("{")
    (path.parent / "other.json").write_text(json.dumps({"host": "here"}))
    assert [each.host for each in calibration.load_all()] == ["here"]


def test_measured_times_are_used_and_scaled_beyond():
    machine = calibration.measured_machine([made()], "fp32")
    assert machine.seconds(Collective("all_reduce", 1e6, "gradients"), 2) == pytest.approx(2e-3)
    assert machine.seconds(Collective("all_reduce", 3e3, "gradients", calls=3), 2) == pytest.approx(3e-3)
    assert machine.seconds(Collective("all_reduce", 1e6, "gradients"), 1) == 0
    four = machine.seconds(Collective("all_reduce", 1e6, "gradients"), 4)
    fit = TABLES[0].fit()
    assert four == pytest.approx(3 * fit.latency + 1e6 * 1.5 / fit.bandwidth)
    assert machine.seconds(Collective("broadcast", 1e6, "weights"), 2) is None


def test_ranks_share_the_cores_of_a_machine():
    machine = calibration.measured_machine([made()], "fp32")
    assert machine.rate(160, 2) == pytest.approx(2e9)
    assert [machine.rate(1, n) for n in (1, 2, 4)] == [2e9, 1e9, 0.5e9]
    assert machine.rate(1e6, 2) == 3e9
    assert calibration.measured_machine([made()], "bf16") is None


def test_this_machine_is_measured_or_known_or_unknown():
    plan = PlanConfig()
    assert calibration.machine_here(plan, "fp32", None).flops_per_second is None
    known = calibration.machine_here(plan, "bf16", "NVIDIA H200")
    assert known == Machine.of_device("h200", "bf16")
    calibration.save(made())
    assert calibration.machine_here(plan, "fp32", None).products == PRODUCTS["fp32"]
    assert calibration.machine_here(plan, "bf16", "NVIDIA H200") == known
    calibration.save(made(device="NVIDIA H200", on_gpu=True, products={"bf16": ProductRates((64,), (7e14,))}))
    measured = calibration.machine_here(plan, "bf16", "NVIDIA H200")
    assert measured.rate(8192, 1) == measured.rate(8192, 8) == 7e14
    assert measured.peak_flops == known.peak_flops and measured.memory_bytes == known.memory_bytes


def test_noisy_times_make_no_fit_and_no_guess():
    noisy = (CollectiveTable("all_reduce", 2, (1e3, 1e6), (2e-3, 1e-3)),)
    machine = calibration.measured_machine([made(collectives=noisy)], "fp32")
    assert machine.seconds(Collective("all_reduce", 1e6, "gradients"), 2) == pytest.approx(1e-3)
    assert machine.seconds(Collective("all_reduce", 1e6, "gradients"), 4) is None


def test_a_real_world_of_two_is_measured_within_a_minute_and_the_plan_says_so(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = time.monotonic()
    command = [sys.executable, "-m", "harness.calibrate", "launch.world_size=2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 60
    (path,) = (tmp_path / "harness" / "calibration").glob("*.json")
    found = calibration.read(json.loads(path.read_text()))
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(found)))
    assert {table.operation for table in found.collectives} == set(OPERATIONS)
    assert all(len(table.sizes) >= 4 for table in found.collectives)
    assert max(found.products["fp32"].flops_per_second) > 1e9
    command = [sys.executable, "-m", "harness.plan", "plan.world_sizes=[2]", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    plan = json.loads(done.stdout)
    assert plan["machine"]["measured"] and plan["machine"]["measured_world_sizes"] == [2]
    assert plan["worlds"][0]["rows"][1]["step_time_s"] > 0


def test_only_the_number_of_ranks_can_be_chosen():
    command = [sys.executable, "-m", "harness.calibrate", "zero=stage3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: zero=stage3: only launch.world_size=N can be chosen\n"
