"""Ranks are forked from one process; what happens to it, and where they are started from."""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from multiprocessing import forkserver

import psutil
import pytest

from harness import forkserver as ours
from harness.forkserver import Ranks, StartError, places_here, start_method, start_server
from tests.launched import ROOT


def write_place(world, folder):
    (folder / str(world.rank)).write_text(f"{os.getppid()} {os.environ['RANK']} {os.environ.get('SLURM_NTASKS')}")


def sleep_or_fail(world):
    time.sleep(60 if world.rank == 0 else 0)
    raise ValueError("rank 1 fails")


def run(function, *arguments, size=2, logs):
    Ranks(places_here(size), logs).run(function, *arguments)


def servers(folder):
    return {path.read_text().split()[0] for path in folder.glob("[01]")}


def test_ranks_of_all_worlds_come_from_one_server_and_a_dead_one_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "7")
    seen = []
    for _ in range(2):
        run(write_place, tmp_path, logs=tmp_path)
        seen.append(servers(tmp_path))
    assert seen[0] == seen[1] and len(seen[0]) == 1
    assert [path.read_text().split()[1:] for path in sorted(tmp_path.glob("[01]"))] == [["0", "None"], ["1", "None"]]
    (server,) = seen[0]
    os.kill(int(server), signal.SIGKILL)
    time.sleep(0.1)
    run(write_place, tmp_path, logs=tmp_path)
    assert len(servers(tmp_path)) == 1 and servers(tmp_path) != seen[0]


def test_a_rank_that_fails_ends_the_others(tmp_path):
    started = time.monotonic()
    run(sleep_or_fail, logs=tmp_path)
    assert time.monotonic() - started < 30
    assert "ValueError: rank 1 fails" in (tmp_path / "rank1.log").read_text()


def test_a_server_that_cannot_import_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "start_server", lambda: None)
    monkeypatch.setattr(ours, "server_output", lambda: io.StringIO("Traceback\nImportError: no torch\n"))
    monkeypatch.setattr(forkserver, "connect_to_new_process", lambda fds: (tmp_path / "gone").read_bytes())
    with pytest.raises(StartError, match="ranks cannot be started: ImportError: no torch"):
        Ranks(places_here(1), tmp_path).start(write_place, tmp_path)


def test_no_place_for_temporary_files_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "server_output", cache(lambda: tempfile.TemporaryFile(dir=tmp_path / "gone")))  # noqa: SIM115
    with pytest.raises(StartError, match=r"ranks cannot be started: FileNotFoundError: .*gone"):
        Ranks(places_here(1), tmp_path).start(write_place, tmp_path)


def test_ranks_do_not_wait_for_those_that_a_dead_parent_never_starts(tmp_path):
    """The parent is killed once it has started rank 0 of two."""
    code = (
        "import os, signal, sys; from pathlib import Path; from harness.forkserver import Ranks, places_here\n"
        "ranks = Ranks(places_here(2)[:1], Path(sys.argv[1])); ranks.start(print)\n"
        "print(ranks._living()[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    psutil.wait_procs([psutil.Process(int(done.stdout))], timeout=20)
    assert not psutil.pid_exists(int(done.stdout))


def test_ctrl_c_during_the_start_of_the_server_is_heard(monkeypatch):
    monkeypatch.setattr(forkserver, "ensure_running", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        start_server()


def test_a_worker_of_joblib_can_start_ranks():
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    with start_method():
        assert multiprocessing.get_start_method() == "forkserver"
    assert multiprocessing.get_start_method() == "spawn"
    multiprocessing.set_start_method(before, force=True)


def test_the_server_leaves_the_environment_and_the_screen_as_they_were(capfd):
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    start_server()
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before
    print("seen")
    assert capfd.readouterr().out == "seen\n"
