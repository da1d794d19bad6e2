"""The report's pictures of what was predicted, and what small worlds say of larger ones."""

import pytest

from harness.report import extrapolation, predicted, write_report
from harness.report.curves import Curve, LeftOut
from harness.report.extrapolation import fit_step_times
from harness.report.runs import read_runs
from harness.report.series import Comparison
from harness.report.table import run_rows
from tests.run_factory import make_run, resolved, summary_of


def make_worlds(runs_dir, worlds=(1, 2, 4), batch="strong", time=lambda n: 0.1 + 0.8 / n, stages=(0, 3)):
    size = ["batch=weak", "batch.per_rank_size=4"] if batch == "weak" else ["batch.global_size=32"]
    for stage in stages:
        for world in worlds:
            config = resolved(runs_dir, f"zero=stage{stage}", *size, "train.steps=20", world_size=world)
            step = time(world)
            rate = config.batch.global_size * config.data.seq_len / step
            summary = summary_of(config, rate)
            expected = {
                "param_bytes": 1.25 * summary["param_bytes"], "grad_bytes": summary["grad_bytes"],
                "optimizer_bytes": summary["optimizer_bytes"], "step_time_s_median": step / 2,
                "comm_bytes_per_step": summary["comm_bytes_per_step"], "peak_memory_bytes": None,
            }  # fmt: skip
            make_run(config, tokens_per_s=rate, predicted=expected)


def compare(folder):
    return Comparison(read_runs([folder])[0])


def test_predicted_and_measured_stand_against_each_other(tmp_path):
    make_worlds(tmp_path)
    curve = predicted.against_measured(compare(tmp_path / "study"))
    assert isinstance(curve, Curve)
    assert [panel.title for panel in curve.panels] == [
        "model states of a rank", "given to collectives per update", "step time",
    ]  # fmt: skip
    lines = {line.label: line for line in curve.panels[2].lines}
    assert set(lines) == {"ZeRO-0", "ZeRO-3", "equal"}
    assert sorted(lines["ZeRO-3"].x) == pytest.approx([0.15, 0.25, 0.45])
    assert [y / x for x, y in zip(lines["ZeRO-3"].x, lines["ZeRO-3"].y, strict=True)] == pytest.approx([2, 2, 2])
    assert "step time +100.0% to +100.0%" in curve.note and "given to collectives per update +0.0%" in curve.note


def test_the_table_has_relative_residuals(tmp_path):
    make_worlds(tmp_path, worlds=(2,))
    rows = run_rows(compare(tmp_path / "study"))
    assert [row["residual.step_time_s_median"] for row in rows] == pytest.approx([1, 1])
    assert [row["residual.param_bytes"] for row in rows] == pytest.approx([-0.2, -0.2])


def test_runs_without_predictions_make_no_picture(tmp_path):
    make_run(resolved(tmp_path), predicted=None)
    assert isinstance(predicted.against_measured(compare(tmp_path / "study")), LeftOut)


def test_a_fit_recovers_what_is_divided_and_what_is_not():
    strong = fit_step_times("strong", {1: 0.9, 2: 0.5})
    assert (strong.constant, strong.slope, strong.at(8)) == pytest.approx((0.1, 0.8, 0.2))
    weak = fit_step_times("weak", {8: 1.07, 16: 1.15, 32: 1.31})
    assert (weak.constant, weak.slope, weak.at(512)) == pytest.approx((1.0, 0.01, 6.11))
    slower = fit_step_times("weak", {1: 1.0, 2: 0.9, 4: 0.95})
    assert slower.slope == 0 and 0.9 < slower.constant < 1
    assert fit_step_times("strong", {1: 1.0, 2: 0.4}).constant == 0
    with pytest.raises(ValueError, match="two or more"):
        fit_step_times("weak", {1: 1.0})


def test_steps_of_published_worlds_are_foretold_by_smaller_ones():
    """llm-foundry's 7B on H100, tokens/s/GPU at 8 to 512 GPUs: the step grows in proportion to the ranks."""
    times = {ranks: 1e4 / rate for ranks, rate in ((8, 10643), (128, 10475), (256, 10119), (512, 9670))}
    fit = fit_step_times("weak", {ranks: times[ranks] for ranks in (8, 128, 256)})
    assert fit.at(512) == pytest.approx(times[512], rel=0.03)


@pytest.mark.parametrize(("batch", "time"), [("strong", lambda n: 0.1 + 0.8 / n), ("weak", lambda n: 1 + 0.1 * n)])
def test_the_largest_world_checks_what_the_others_foretell(tmp_path, batch, time):
    make_worlds(tmp_path, batch=batch, time=lambda n: time(n) * (1.5 if n == 4 else 1), stages=(1,))
    curve = extrapolation.step_times(compare(tmp_path / "study").by_ranks())
    assert isinstance(curve, Curve)
    points, fitted = curve.panels[0].lines
    assert points.x == [1, 2, 4] and fitted.x == [1, 2, 4, 8, 16]
    assert fitted.y[:2] == pytest.approx([time(1), time(2)]) and fitted.y[4] == pytest.approx(time(16))
    assert "at 4 ranks +50%" in curve.note


def test_two_worlds_cannot_be_checked(tmp_path):
    make_worlds(tmp_path, worlds=(1, 2))
    found = extrapolation.step_times(compare(tmp_path / "study").by_ranks())
    assert isinstance(found, LeftOut) and "three world sizes" in found.why


def test_both_pictures_are_drawn(tmp_path):
    make_worlds(tmp_path)
    report = write_report([tmp_path / "study"])
    assert (report / "predicted.png").stat().st_size > 10_000
    assert (report / "extrapolation.svg").stat().st_size > 10_000
