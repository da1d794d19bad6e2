"""Every way in trains and records; TERM to its outermost process ends every rank and says so."""

import os
import signal
import sys

import pytest

from harness.forkserver import free_port
from tests.launched import FORMS, MAIN, QUICK, Launched, still_alive

# `python` runs to its end in test_run.py, and is told to end in test_preemption.py and test_sweep.py.
LAUNCHERS = [form for form in FORMS if form != "python"]
RARE = "deepspeed --no_local_rank"
SOME_LAUNCHERS = [pytest.param(form, marks=pytest.mark.slow) if form == RARE else form for form in LAUNCHERS]
LONG = [*QUICK, "train.steps=100000", "train.log_every=1"]


@pytest.mark.parametrize(
    "form", [form for form in SOME_LAUNCHERS if form != "deepspeed"]
)  # test_readme.py has that one
def test_a_run_completes_in_every_form_from_any_folder(form, tmp_path):
    launched = Launched([*FORMS[form], *QUICK], tmp_path)
    assert launched.wait() == 0, launched.text()
    run = launched.run()
    assert run.read_status()["status"] == "completed"
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    summary = run.read_summary()
    assert (summary["world_size"], summary["zero_stage"], summary["global_batch_size"]) == (2, 3, 8)
    assert "final loss" in launched.text() and "wandb sync" in launched.text()
    assert "FutureWarning" not in launched.text()


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if "--" in form else form for form in LAUNCHERS]
)
def test_term_to_the_outermost_process_leaves_killed_and_no_orphan(form, tmp_path):
    launched = Launched([*FORMS[form], *LONG], tmp_path)
    run = launched.wait_for_update()
    below = launched.descendants()
    assert len(below) >= 2
    launched.process.send_signal(signal.SIGTERM)
    launched.wait(60)
    assert still_alive(below, within_s=30) == []
    assert run.read_status()["status"] == "killed", run.read_status()


def test_slurm_tasks_are_ranks(tmp_path):
    """What srun sets for a step of two tasks is all a rank needs."""
    step = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    folders = [tmp_path / "task0", tmp_path]
    folders[0].mkdir()
    tasks = [
        Launched(
            [sys.executable, MAIN, *QUICK, f"runs_dir={tmp_path}/runs"], folder,
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **step,
        )
        for rank, folder in enumerate(folders)
    ]  # fmt: skip
    assert [task.wait() for task in tasks] == [0, 0], tasks[0].text() + tasks[1].text()
    run = tasks[1].run()
    assert run.read_status()["status"] == "completed"
    assert run.read_summary()["world_size"] == 2


def test_a_batch_script_of_slurm_is_no_rank(tmp_path):
    launched = Launched(
        [sys.executable, MAIN, "--cfg", "job"], tmp_path, SLURM_JOB_ID="1", SLURM_PROCID="0", SLURM_NTASKS="2"
    )
    assert launched.wait() == 0
    assert "seed: 0" in launched.text()


def test_an_answer_comes_once_and_ends_every_rank(tmp_path):
    launched = Launched([*FORMS["deepspeed"], "--cfg", "job"], tmp_path)
    assert launched.wait() == 0
    assert launched.text().count("runs_dir: runs") == 1
    assert not os.path.exists(tmp_path / "runs")
