"""A run that is told to stop leaves a checkpoint, goes on from it when started again, and can be exported."""

import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.data import open_data
from tests.launched import FORMS, QUICK, Launched, still_alive
from tests.worlds import compose

LONG = [*QUICK, "train.steps=24", "train.checkpoint_every=4000", "train.log_every=5", "lr.schedule=constant"]


def test_told_to_stop_it_checkpoints_and_goes_on_where_it_was(tmp_path):
    slow = ["data.seq_len=256", "batch.global_size=16"]
    launched = Launched([*FORMS["python"], *LONG, *slow], tmp_path)
    run = launched.wait_for_update()
    below = launched.descendants()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait(60) == 1
    assert still_alive(below, within_s=30) == []
    status = run.read_status()
    assert status["status"] == "killed" and status["resumable"] is True, (status, launched.text())
    (checkpoint,) = (run.path / "checkpoints").iterdir()
    stopped_at = int(checkpoint.name.split("-")[1]) // 16
    assert stopped_at == run.read_metrics()[-1]["step"] < 24
    before = run.read_metrics()

    again = Launched([*FORMS["python"], *LONG, *slow], tmp_path)
    assert again.wait(200) == 0, again.text()
    rows = again.run().read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[:stopped_at] == before
    status = again.run().read_status()
    assert (status["status"], status["attempt"]) == ("completed", 2) and checkpoint.name in status["resumed_from"]
    summary = again.run().read_summary()
    assert summary["samples"] == 24 * 16
    assert 0 < summary["load_time_s"] < summary["wall_s"] and 0 < summary["checkpoint_time_s"] < summary["wall_s"]
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)

    command = [sys.executable, "-m", "harness.export", str(again.run().path), str(tmp_path / "exported")]
    subprocess.run(command, check=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    data = open_data(compose("data.seq_len=256", "data.eval_samples=8"), 256)
    ids, labels = data.batch(data.corpus.eval_indices())
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).loss.item()
    assert loss == pytest.approx(again.run().read_summary()["eval_loss"], rel=1e-5)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "exists and is not empty" in refused.stderr
