"""README's further commands work as printed."""

import os
import re
import subprocess

import pytest
import yaml

from harness.rundir import RunDir
from tests.launched import BIN, ROOT

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if "pip install" not in line]  # .ci/run runs those


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_readme_works(command, tmp_path):
    (tmp_path / "harness").symlink_to(ROOT / "harness")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunDir(path.parent) for path in tmp_path.glob("runs/*/*/summary.json")]
    summaries = [run.read_summary() for run in runs]
    assert summaries
    assert "FutureWarning" not in done.stdout + done.stderr
    if command.startswith("deepspeed"):
        ((run,), (summary,)) = runs, summaries
        assert run.read_status()["status"] == "completed"
        steps = int(re.search(r"train.steps=(\d+)", command)[1])
        assert [row["step"] for row in run.read_metrics()] == list(range(1, steps + 1))
        stage = int(re.search(r"zero=?(?:stage)?(\d)", command)[1])
        assert (summary["world_size"], summary["zero_stage"]) == (2, stage)
        assert "final loss" in done.stdout and "wandb sync" in done.stdout
    if "optuna" in command:
        (results,) = tmp_path.glob("runs/*/.sweep/optimization_results.yaml")
        best = yaml.safe_load(results.read_text())["best_value"]
        assert best == min(summary["eval_loss"] for summary in summaries)
