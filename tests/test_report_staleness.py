"""Pictures of asynchrony show the numbers they claim."""

from pathlib import Path

import numpy as np
import pytest

from harness.config import total_steps
from harness.report import losses, staleness
from harness.report.curves import Curve, LeftOut
from harness.report.record import DamagedRun, check_run
from harness.report.runs import read_runs
from harness.report.series import Comparison
from harness.report.table import point_rows
from harness.staleness import build_schedule
from tests.run_factory import loss_at, make_run, metric_rows, resolved


def make_arm(root: Path, penalty: float, *overrides: str, status: str = "completed") -> None:
    """A run that needs `penalty` times the samples of another to any loss; its clock and staleness are real."""
    config = resolved(root, *overrides)
    schedule = build_schedule(config.parallel, config.batch.global_size, config.seed)
    rows = metric_rows(config)
    for row in rows:
        schedule.advance(row["step"] == total_steps(config))
        tally = schedule.tally
        row |= {"loss": loss_at(row["samples"] / penalty), "updates": tally.updates, "sim_time_s": tally.now_s}
        if row["samples"] % 320 == 0 and "train.eval_every=320" in overrides:
            row |= {"eval_loss": row["loss"], "loss": 3 - row["loss"] / 10}  # the training loss would mislead
    counts = {str(each): count for each, count in sorted(tally.staleness_counts.items())}
    make_run(config, status, rows=rows, staleness_mean=tally.staleness_mean, staleness_histogram=counts,
             updates=tally.updates, sim_time_s=tally.now_s)  # fmt: skip


def compare(root: Path) -> Comparison:
    runs, skipped = read_runs([root / "study"])
    assert not skipped
    return Comparison(runs)


ASYNC = "parallel=async"
EXPONENTIAL = "parallel.clock=exponential"


@pytest.fixture
def study(tmp_path):
    make_arm(tmp_path, 1.0, "parallel.workers=8")
    for workers, penalty in ((2, 1.05), (8, 1.2)):
        make_arm(tmp_path, penalty, ASYNC, f"parallel.workers={workers}")
        make_arm(tmp_path, penalty + 0.5, ASYNC, EXPONENTIAL, f"parallel.workers={workers}")
    make_arm(tmp_path, 1.0, ASYNC, "parallel.workers=16", status="diverged")
    return compare(tmp_path)


@pytest.mark.parametrize("evaluated", [(), ("train.eval_every=320",)])
@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.25])
def test_token_overhead_is_the_samples_needed_to_equal_loss(tmp_path, penalty, evaluated):
    make_arm(tmp_path, 1.0, *evaluated)
    make_arm(tmp_path, penalty, ASYNC, *evaluated)
    runs = {run.config["parallel.kind"]: run for run in compare(tmp_path).runs}
    assert staleness.token_overhead(runs["async"], runs["sync"]) == pytest.approx(penalty, rel=0.02)


def test_overhead_is_over_the_synchronous_run_of_equal_seed_and_settings(tmp_path):
    for seed, penalty in ((0, 1.1), (1, 1.3)):
        make_arm(tmp_path, 1.0 + seed, f"seed={seed}")
        make_arm(tmp_path, penalty * (1.0 + seed), ASYNC, f"seed={seed}", "zero=stage3")
    make_arm(tmp_path, 3.0, "optimizer=sgd")
    curve = staleness.token_overheads(compare(tmp_path))
    assert isinstance(curve, Curve)
    (line, sync) = curve.panels[0].lines
    assert line.x == [8] and (line.low[0], line.high[0]) == pytest.approx((1.1, 1.3), rel=0.02)
    assert sync.ideal and sync.y == [1.0, 1.0]


def test_break_even_is_the_slowest_over_one(study):
    curve = staleness.break_even(study)
    assert isinstance(curve, Curve)
    panels = {panel.title: panel.lines for panel in curve.panels}
    assert set(panels) == {"exponential clock", "lognormal clock, cv 0.1"}
    measured, saved = panels["exponential clock"]
    assert measured.x == [2, 8] and measured.y == pytest.approx([1.55, 1.7], rel=0.02)
    assert saved.x == list(range(1, 9)) and saved.ideal
    assert saved.y == pytest.approx([sum(1 / i for i in range(1, n + 1)) for n in range(1, 9)])
    measured, saved = panels["lognormal clock, cv 0.1"]
    assert measured.y == pytest.approx([1.05, 1.2], rel=0.02)
    assert [(mark.x, mark.status) for mark in measured.marks] == [(16, "diverged")]
    assert 1.1 < saved.y[7] < 1.2


def test_staleness_is_held_against_theory(study):
    curve = staleness.histogram(study)
    assert isinstance(curve, Curve)
    panels = {panel.title: panel.lines for panel in curve.panels}
    steps = 150
    for lines in panels.values():
        for line, workers in zip([line for line in lines if not line.ideal], (2, 8), strict=True):
            mean = (workers - 1) * (steps - workers / 2) / steps
            assert line.label == f"{workers} workers: mean {mean:.2f}"
            assert sum(line.y) == pytest.approx(1) and np.dot(line.x, line.y) == pytest.approx(mean)
    (geometric,) = (line for line in panels["exponential clock"] if line.ideal and line.y[0] == 1 / 8)
    assert geometric.y[:3] == pytest.approx([1 / 8, 7 / 64, 49 / 512])
    assert not any(line.ideal for line in panels["lognormal clock"])


def test_loss_is_shown_against_updates_and_simulated_time(study):
    for axis, last in (("updates", {150}), ("sim_time_s", None)):
        curve = losses.against(study, axis)
        assert isinstance(curve, Curve)
        ends = {line.x[-1] for line in curve.panels[0].lines}
        assert len(curve.panels[0].lines) == 6 and (last is None or ends == last), axis


def test_a_study_of_sync_has_none_of_these_pictures(tmp_path):
    make_arm(tmp_path, 1.0, "zero=stage0")
    make_arm(tmp_path, 1.0, "zero=stage3")
    comparison = compare(tmp_path)
    pictures = [staleness.histogram, staleness.token_overheads, staleness.break_even]
    assert all(isinstance(picture(comparison), LeftOut) for picture in pictures)
    assert all(isinstance(losses.against(comparison, axis), LeftOut) for axis in ("updates", "sim_time_s"))
    assert "staleness" not in point_rows(comparison)[0]


def test_the_table_of_a_study_with_async_shows_the_clock_of_sync_too(study):
    rows = {row["series"]: row for row in point_rows(study)}
    assert float(rows["sync, 8 workers, lognormal clock"]["simulated time (s)"]) > 0
    assert rows["async, 8 workers, lognormal clock"]["staleness"] == "6.813"


def test_a_damaged_histogram_is_refused(study):
    run = next(run for run in study.runs if run.status == "completed")
    for histogram in ({"one": 1}, {"1": "many"}, {"-1": 2}, [1]):
        run.summary["staleness_histogram"] = histogram
        with pytest.raises(DamagedRun, match="staleness_histogram"):
            check_run(run)
