"""Faults from outside cost a sweep nothing that was saved. ``tests/campaign.py`` draws any number of them."""

import os
import shutil
from collections import deque

import pytest

from tests import campaign
from tests.campaign import OUTSIDE, ROOT, STEPS, Injection, Sweep


def test_six_faults_on_one_point_lose_nothing_that_was_saved(tmp_path, monkeypatch):
    """Three worlds. In the first W&B is killed, the parent sleeps for a while, a rank dies and the newest checkpoint is
    changed in one byte; the second goes on from the one before and loses its parent; the third cannot reach W&B and completes."""
    kill_rank = OUTSIDE["checkpoint damaged"]

    def three_at_once(*arguments):
        for fault in (OUTSIDE["wandb killed"], OUTSIDE["stop and continue parent"], kill_rank):
            fault(*arguments)

    monkeypatch.setitem(OUTSIDE, "checkpoint damaged", three_at_once)
    corpus = tmp_path / "corpus.txt"
    shutil.copy(ROOT / "README.md", corpus)
    sweep = Sweep(tmp_path, corpus, "zero2", "quick", f"quick-{os.getpid()}", batches=(4,))
    damaged = Injection(0, "checkpoint damaged", "checkpoint", 0.2, 0, "byte flipped")
    parent = Injection(1, "kill parent", "updates", 0.2, 0, "")
    wandb = Injection(2, "wandb unreachable", "start", 0, 0, "")
    (point,) = sweep.points
    for each in (damaged, parent, wandb):
        whole = point.whole
        assert sweep.inject(deque([each])) == [each], each
        if each is parent:
            assert point.run.read_status()["resumed_from"].endswith(f"/samples-{whole}")
    sweep.check_complete({})
    assert [each.failures for each in (damaged, parent, wandb)] == [[], [], []]
    assert point.run.read_status()["attempt"] == 3
    assert point.run.read_summary()["samples"] == 4 * STEPS
    assert "damaged, passed over" in (tmp_path / "output.log").read_text()


@pytest.mark.slow
def test_a_campaign_of_random_faults_is_survived(tmp_path, capsys):
    assert campaign.main(["--injections", "12", "--seed", "1", "--folder", str(tmp_path)]) == 0
    assert "| all | 12 / 12 |" in capsys.readouterr().out
