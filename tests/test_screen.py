"""What a person sees, and what happens when nobody looks any more."""

import os
import sys

from harness.launch import MetricsTail
from harness.rundir import RunDir
from harness.screen import Shown


def test_what_nobody_reads_any_more_goes_nowhere():
    reading, writing = os.pipe()
    shown = Shown(os.fdopen(writing, "w", buffering=1))
    print("seen", file=shown)
    assert os.read(reading, 100) == b"seen\n"
    os.close(reading)
    for _ in range(3):
        print("unseen", file=shown)
        shown.flush()
    assert shown.encoding.lower() == "utf-8" and not shown.isatty()
    assert Shown(sys.__stdout__).fileno() == 1


def test_progress_starts_where_the_record_ends_and_follows_a_cut(tmp_path):
    run, path = RunDir(tmp_path), tmp_path / "metrics.jsonl"
    assert MetricsTail(run).newest() is None
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = MetricsTail(run)
    assert tail.newest() is None  # rows of an earlier attempt
    path.write_text('{"step": 1}\n')
    assert tail.newest() is None
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": 3}\n{"st')
    assert tail.newest() == {"step": 3}
