"""README's further commands work as printed."""

import os
import re
import subprocess

import pytest

from tests.launched import BIN, ROOT

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if "pip install" not in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_readme_works(command, tmp_path):
    (tmp_path / "harness").symlink_to(ROOT / "harness")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/*/summary.json"))
