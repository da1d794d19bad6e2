"""README's further commands work as printed."""

import json
import os
import re
import subprocess

import pytest
import yaml

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
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/summary.json")]
    assert summaries
    if "optuna" in command:
        (results,) = tmp_path.glob("runs/*/.sweep/optimization_results.yaml")
        best = yaml.safe_load(results.read_text())["best_value"]
        assert best == min(summary["eval_loss"] for summary in summaries)
