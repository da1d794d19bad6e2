"""Sweeps: however a point ends is recorded and the others go on; started again, only what is missing runs."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig

from harness.main import run_parent
from harness.rundir import RunDir
from harness.sweep import Sweep, share_threads
from tests.launched import FORMS, MAIN, QUICK, ROOT, Launched, still_alive

# One sweep over learning rates; a run's name tells its batch, so the fault is chosen by that.
BATCHES = {
    2: None, 8: [1, 2, "hang"], 10: [1, 2, "oom"], 12: [0, 2, "kill"], 14: [0, 2, "kill server"], 18: [1, 2, "nan"]
}  # fmt: skip
EXPECTED = {
    2: ("completed", ""), 8: ("timeout", "launch.timeout_s=16"),
    10: ("oom", "rank 1: OutOfMemoryError: injected: tried to allocate"), 12: ("failed", "rank 0 died"),
    14: ("completed", ""), 18: ("diverged", "the gradient norm of update 3 is"),
}  # fmt: skip
SWEEP = [
    sys.executable, MAIN, "-m", "+exp=zero1", f"batch.global_size=3,{','.join(map(str, BATCHES))}", "study=ends",
    "launch.world_size=2", "launch.timeout_s=16", "train.steps=4", "data.eval_samples=8", "data.seq_len=32",
]  # fmt: skip


def statuses(runs):
    return {int(run.path.name.split("-b")[1].split("-")[0]): run.read_status() for run in runs if "-b" in run.path.name}


def completed_at(runs):
    return {run.path.name: run.read_status()["updated_at"] for run in runs}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The sweep with a fault in all but one of its points."""
    faults = {f"-b{batch}-": fault for batch, fault in BATCHES.items() if fault}
    launched = Launched(
        SWEEP, tmp_path_factory.mktemp("sweep"),
        FAULTS=json.dumps(faults), PYTHONPATH=f"{ROOT}/tests/faults:{ROOT}",
    )  # fmt: skip
    below = []
    while launched.process.poll() is None:
        below += [process for process in launched.descendants() if process not in below]
        try:
            launched.process.wait(1)
        except subprocess.TimeoutExpired:
            continue
    assert launched.process.returncode == 0, launched.text()
    assert still_alive(below, within_s=10) == []
    return launched


@pytest.mark.parametrize("batch", EXPECTED)
def test_every_way_to_end_is_recorded(ended, batch):
    status = statuses(ended.runs())[batch]
    word, reason = EXPECTED[batch]
    assert status["status"] == word and reason in status["reason"], status
    assert "\n" not in status["reason"]


def test_a_refused_point_is_a_failed_point_with_a_directory(ended):
    (refused,) = [run for run in ended.runs() if run.path.name.startswith("refused-")]
    status = refused.read_status()
    assert status["status"] == "failed" and "batch.global_size=3: not divisible by 2 ranks" in status["reason"]
    assert (refused.path / "config.yaml").exists()


def test_the_report_draws_every_point(ended):
    report = ended.folder / "runs" / "ends" / "report"
    rows = list(csv.DictReader((report / "table.csv").open()))
    counts = [row["status"] for row in rows]
    assert {word: counts.count(word) for word in counts} == {
        "completed": 2, "failed": 2, "oom": 1, "timeout": 1, "diverged": 1
    }  # fmt: skip
    assert (report / "index.html").stat().st_size > 10_000
    assert "7 points" in ended.text() and "index.html" in ended.text()


KEPT = {"none": {2, 10, 14, 18}, "failed": {2, 14}, "all": set()}


@pytest.mark.parametrize("rerun", KEPT)
def test_how_a_point_ended_decides_whether_it_is_started_again(ended, rerun, tmp_path, monkeypatch):
    """What would be started, since no world is here."""
    shutil.copytree(ended.folder / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.report.write_report", lambda studies, upload: studies[0])
    started = []
    monkeypatch.setattr("harness.sweep.launch", lambda config, *_: started.append(config.batch.global_size))
    with pytest.raises(SystemExit) as end:
        run_parent(
            [*SWEEP[2:4], f"batch.global_size={','.join(map(str, BATCHES))}", *SWEEP[5:], f"launch.rerun={rerun}"]
        )
    assert end.value.code == 0
    assert started == [batch for batch in BATCHES if batch not in KEPT[rerun]]


def test_started_again_only_what_is_missing_runs(ended):
    before = completed_at(ended.runs())
    kept = {2: "completed", 10: "oom"}
    again = Launched([*SWEEP[:4], "batch.global_size=2,10,12", *SWEEP[5:]], ended.folder)
    assert again.wait(200) == 0, again.text()
    after = statuses(again.runs())
    assert {batch: after[batch]["status"] for batch in (*kept, 12)} == {**kept, 12: "completed"}
    for run in again.runs():
        unchanged = run.read_status()["updated_at"] == before.get(run.path.name)
        assert unchanged is ("-b12-" not in run.path.name), run.path.name
    (redone,) = [run for run in again.runs() if "-b12-" in run.path.name]
    assert redone.read_status()["attempt"] == 2
    assert [row["step"] for row in redone.read_metrics()] == [1, 2, 3, 4]


def test_under_the_launcher_rank_0_sweeps_with_the_launchers_world_size(tmp_path):
    sweep = ["-m", *QUICK, "seed=1", "study=under", "train.steps=2"]
    launched = Launched([*FORMS["deepspeed"], *sweep], tmp_path)
    assert launched.wait(200) == 0, launched.text()
    assert launched.run().read_summary()["world_size"] == 2
    assert launched.text().count("1 points in") == 1


def test_the_tasks_of_a_job_are_the_ranks_of_its_point(tmp_path):
    sweep = [sys.executable, MAIN, "-m", *QUICK, "study=job", "batch.global_size=3,8", "hydra/launcher=submitit_local"]
    launched = Launched([*sweep, "hydra.launcher.tasks_per_node=2"], tmp_path)
    assert launched.wait(200) == 0, launched.text()
    run, refused = launched.runs()
    assert "not divisible by 2 ranks" in refused.read_status()["reason"]
    assert run.read_status()["status"] == "completed"
    assert run.read_summary()["world_size"] == 2
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert {path.name for path in run.logs.iterdir()} == {"rank0.log", "rank1.log"}
    assert "1 failed" in launched.text() and "1 completed" in launched.text() and "index.html" in launched.text()


def test_ctrl_c_stops_a_sweep_and_it_can_be_continued(tmp_path):
    sweep = [sys.executable, MAIN, "-m", *QUICK, "train.steps=100000,2", "train.log_every=1", "launch.world_size=1"]
    launched = Launched(sweep, tmp_path)
    launched.wait_for_update()
    below = launched.descendants()
    launched.process.send_signal(2)
    assert launched.wait(60) == 1
    assert still_alive(below, within_s=10) == []
    (run,) = launched.runs()
    assert run.read_status()["status"] == "killed"
    assert "goes on with the points that are left" in launched.text()


def test_a_bad_value_for_hydra_stops_the_sweep_before_its_first_job(tmp_path):
    launched = Launched([sys.executable, MAIN, "-m", "zero=stage0,stage9"], tmp_path)
    assert launched.wait() == 1
    assert launched.text().strip().splitlines()[-1].startswith("error: ")
    assert "stage9" in launched.text() and "stage3" in launched.text()
    assert launched.runs() == []


@pytest.mark.parametrize(
    ("argument", "words"), [("+exp=strong_scaling", "run it with -m"), ("hydra.mode=MULTIRUN", "with -m")]
)
def test_a_sweep_is_refused_without_m(argument, words, tmp_path):
    launched = Launched([sys.executable, MAIN, argument], tmp_path)
    assert launched.wait() == 1
    assert words in launched.text() and launched.runs() == []


def test_two_sweeps_on_one_study_do_not_clobber(tmp_path):
    sweep = [sys.executable, MAIN, "-m", *QUICK, "seed=0,1", "launch.world_size=1"]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    both = [Launched([*sweep, f"runs_dir={tmp_path}/runs"], folder) for folder in folders]
    assert [one.wait(200) for one in both] == [0, 0], both[0].text() + both[1].text()
    runs = [RunDir(path.parent) for path in tmp_path.glob("runs/default/*/status.json")]
    assert [run.read_status()["status"] for run in runs] == ["completed"] * 2
    assert [[row["step"] for row in run.read_metrics()] for run in runs] == [[1, 2, 3]] * 2


@pytest.mark.parametrize(("direction", "told"), [("minimize", math.inf), ("maximize", -math.inf), (None, math.nan)])
def test_a_point_without_an_objective_is_the_worst_to_optuna(direction, told, monkeypatch):
    sweeper = {"direction": direction and SimpleNamespace(name=direction)}
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(sweeper=sweeper))
    sweep = Sweep.__new__(Sweep)
    monkeypatch.setattr(sweep, "_point", lambda composed: math.nan)
    assert sweep({}) == pytest.approx(told, nan_ok=True)
    monkeypatch.setattr(sweep, "_point", lambda composed: 2.5)
    assert sweep({}) == 2.5


@pytest.mark.parametrize(
    ("params", "arguments", "threads"),
    [
        ({}, ["-m", "launch.world_size=1,2,4", "seed=0,1"], "2"),
        ({"launch.world_size": "1,2"}, ["-m"], "4"),
        ({"launch.world_size": "1,2"}, ["-m", "launch.world_size=1,16"], "1"),
        ({}, ["-m", "seed=0,1"], None),
    ],
)
def test_a_rank_has_the_same_threads_in_every_world_of_a_sweep(params, arguments, threads, monkeypatch):
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(sweeper={"params": params}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "environ", {})
    share_threads(arguments)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "3"})
    share_threads(arguments)
    assert os.environ["OMP_NUM_THREADS"] == "3"
