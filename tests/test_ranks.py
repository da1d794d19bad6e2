"""What a rank raises becomes a status and one line."""

import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from harness.config import ConfigError
from harness.launch import last_line
from harness.ranks import Diverged, ToldToStop, Watch, describe
from harness.rundir import RunDir
from harness.train import Leader


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("injected\n  twice"), "failed", "RuntimeError: injected twice (test_ranks.py:38)"),
        (ConfigError("lr.base=0: a rate"), "failed", "lr.base=0: a rate"),
        (Diverged("the loss is nan"), "diverged", "the loss is nan"),
        (ToldToStop("received SIGTERM"), "killed", "received SIGTERM"),
        (torch.OutOfMemoryError("1 GiB"), "oom", "OutOfMemoryError: 1 GiB"),
        (MemoryError("1 GiB"), "oom", "MemoryError: 1 GiB"),
        (RuntimeError("CUDA out of memory"), "oom", "RuntimeError: CUDA out of memory"),
        (ValueError("x" * 1000), "failed", f"ValueError: {'x' * 500} (test_ranks.py:38)"),
    ],
)
def test_an_error_is_described_in_one_line(error, status, reason):
    with pytest.raises(type(error)) as raised:
        raise_here(error)
    assert describe(raised.value) == (status, reason)


def raise_here(error):
    raise error


def verdict(monkeypatch, own, note):
    """Rank 0's, of a world of two whose other rank left a note."""
    watch = Watch.__new__(Watch)
    watch.oom_kills = 0
    monkeypatch.setattr("harness.ranks.oom_kills", lambda: 0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    watch._dead = lambda: [1]
    watch._notes = lambda: {1: {"rank": 1, **note}}
    return watch._verdict(*own)


@pytest.mark.parametrize(
    ("own", "theirs", "late_s", "expected"),
    [
        # the other rank alone was told to stop, and both left with a checkpoint, rank 0 first
        (("killed", "another rank was told to stop"), ("killed", "its launcher vanished"), 1, "its launcher vanished"),
        (("failed", "ConnectionError: reset"), ("killed", "received SIGTERM"), -1, "received SIGTERM"),
        (("failed", "ValueError: here"), ("failed", "ConnectionError: reset"), 1, "ValueError: here"),
        (("failed", "ConnectionError: reset"), ("failed", "ValueError: there"), -1, "rank 1: ValueError: there"),
    ],
)
def test_what_came_first_is_the_verdict(own, theirs, late_s, expected, monkeypatch):
    status, reason = theirs
    got = verdict(monkeypatch, own, {"status": status, "reason": reason, "time": time.time() + late_s})
    assert got[1] == expected and got[0] == (own if expected == own[1] else theirs)[0]


@pytest.mark.parametrize(
    ("note", "dead", "expected"),
    [({}, [1], "end"), ({1: {"status": "failed"}}, [1], "end"), ({1: {"status": "killed"}}, [1], None), ({}, [], None)],
)
def test_being_told_to_stop_because_a_rank_failed_is_a_failure(note, dead, expected):
    """A parent or launcher tells the other ranks as soon as one is gone."""
    watch = Watch.__new__(Watch)
    watch.world, watch.told, watch.can_stop_later = SimpleNamespace(rank=0), None, True
    watch._dead, watch._notes = lambda: dead, lambda: note
    watch.end = mock.Mock(side_effect=SystemExit)
    if expected:
        with pytest.raises(SystemExit):
            watch._stop("received SIGTERM")
        watch.end.assert_called_once_with("failed", "another rank failed")
    else:
        watch._stop("received SIGTERM")
        assert watch.told == "received SIGTERM" and not watch.end.called


def test_a_crash_inside_a_library_is_told_by_pythons_last_words(tmp_path):
    run = SimpleNamespace(logs=tmp_path)
    assert last_line(run) == "(empty)"
    (tmp_path / "rank0.log").write_text(
        "update 1\nFatal Python error: Segmentation fault\n\n  File x in y\nmodules: z\n\n"
    )
    assert last_line(run) == "Fatal Python error: Segmentation fault"
    (tmp_path / "rank0.log").write_text("update 1\nupdate 2\n\n")
    assert last_line(run) == "update 2"


def test_losing_wandb_is_recorded_and_reopens_nothing(tmp_path):
    leader = Leader.__new__(Leader)
    leader.run_dir, leader._recording, leader._ended = RunDir(tmp_path), threading.Lock(), False
    leader.display = SimpleNamespace(say=lambda text: None)
    lost = mock.Mock()
    lost.result.return_value.finish.side_effect = ConnectionResetError("Connection lost")
    leader._starting_tracker = lost
    leader.run_dir.write_status("killed", "received SIGTERM")
    leader._close_tracker("killed", "received SIGTERM")
    status = leader.run_dir.read_status()
    assert (status["status"], status["reason"]) == ("killed", "received SIGTERM")
    assert status["wandb_lost"] == "ConnectionResetError: Connection lost"
    leader._ended = True
    leader._lose_wandb(ConnectionResetError("too late"))
    assert leader.run_dir.read_status() == status
