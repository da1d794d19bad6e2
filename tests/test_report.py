"""The report: which runs it reads, the series it finds, the numbers behind its curves and tables, W&B and speed."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config import ConfigError
from harness.report import losses, resources, throughput, wandb_api, write_report
from harness.report.curves import Bars, Curve, LeftOut, Line, Matrix, Panel, split_panel
from harness.report.panels import apart
from harness.report.pictures import fold
from harness.report.runs import read_runs
from harness.report.scaling import batch_efficiency, spread, strong_efficiency, weak_efficiency
from harness.report.series import Comparison
from harness.report.status import status_matrix
from harness.report.table import run_rows
from harness.rundir import write_json
from tests.run_factory import (
    ENVIRONMENT,
    PARAMETERS,
    composed,
    loss_at,
    make_run,
    make_study,
    metric_rows,
    resolved,
    summary_of,
)


def compare(*folders: Path) -> Comparison:
    runs, skipped = read_runs(list(folders))
    assert not skipped
    return Comparison(runs)


def lines(curve: Any, panel: int = 0) -> dict[str, Line]:
    assert isinstance(curve, Curve), curve
    return {line.label: line for line in curve.panels[panel].lines}


def table(report: Path) -> list[dict[str, str]]:
    with open(report / "table.csv") as file:
        return list(csv.DictReader(file))


# Arithmetic


def test_weak_efficiency_of_a_published_7b_model_on_h100():  # llm-foundry, tokens/s/GPU at 8 and 128, 256, 512
    kept = [weak_efficiency(rate, 10643) for rate in (10475, 10119, 9670)]
    assert kept == pytest.approx([0.9842, 0.9508, 0.9086], abs=2e-4)


def test_strong_efficiency_of_published_bert_on_v100():  # DeepSpeed, minutes at 16, 64, 256, 1024 GPUs
    minutes = {16: 1993, 64: 521, 256: 144, 1024: 44}
    kept = [strong_efficiency(gpus, time, 16, 1993) for gpus, time in minutes.items()]
    assert kept == pytest.approx([1, 0.956, 0.865, 0.708], abs=1e-3)


def test_efficiency_of_a_batch_against_the_critical_one():  # McCandlish 2018
    assert [batch_efficiency(share, 1) for share in (0.25, 0.5, 1, 2, 4)] == pytest.approx(
        [0.8, 2 / 3, 0.5, 1 / 3, 0.2]
    )
    with pytest.raises(ValueError, match="critical_batch_size=0"):
        batch_efficiency(8, 0)


def test_spread_is_median_and_range_of_what_was_measured():
    found = spread([3.0, None, 1.0, 10.0, 2.0])
    assert found and (found.median, found.low, found.high, found.count) == (2.5, 1.0, 10.0, 4)
    assert spread([None]) is None


# Series


def test_stages_are_series_and_seeds_are_not(tmp_path):
    for stage in (0, 3):
        for seed in (0, 1, 2):
            make_run(resolved(tmp_path, f"zero=stage{stage}", f"seed={seed}"), tokens_per_s=1000.0 + seed)
    series = compare(tmp_path / "study").by_ranks()
    assert [each.label for each in series] == ["ZeRO-0", "ZeRO-3"]
    found = series[0].by_ranks()[1].spread("tokens_per_s")
    assert found and (found.median, found.low, found.high, found.count) == (1001.0, 1000.0, 1002.0, 3)


@pytest.mark.parametrize("batch", [("batch=strong", "batch.global_size=32"), ("batch=weak", "batch.per_rank_size=8")])
@pytest.mark.parametrize("micro", ["batch.micro_size=null", "batch.micro_size=4"])
def test_batch_sizes_that_follow_from_the_world_make_no_series(tmp_path, batch, micro):
    for world in (1, 2, 4):
        make_run(resolved(tmp_path, *batch, micro, world_size=world))
    comparison = compare(tmp_path / "study")
    assert comparison.varied == ["launch.world_size"]
    [series] = comparison.by_ranks()
    assert list(series.by_ranks()) == [1, 2, 4]
    assert series.kind == batch[0].removeprefix("batch=")


def test_a_chosen_micro_batch_is_a_series_at_every_world_size(tmp_path):
    for micro in (2, 4):
        for world in (1, 2, 4):
            make_run(resolved(tmp_path, "batch.global_size=16", f"batch.micro_size={micro}", world_size=world))
    series = compare(tmp_path / "study").by_ranks()
    assert {each.label: list(each.by_ranks()) for each in series} == {"micro 2": [1, 2, 4], "micro 4": [1, 2, 4]}


def test_what_an_optimizer_brings_along_makes_no_label(tmp_path):
    for optimizer in ("adamw", "sgd"):
        for rule in ("none", "sqrt"):
            make_run(resolved(tmp_path, f"optimizer={optimizer}", f"lr.rule={rule}"))
    labels = [each.label for each in compare(tmp_path / "study").by_ranks()]
    assert labels == ["AdamW, no rule", "AdamW, sqrt", "SGD, no rule", "SGD, sqrt"]


def test_a_rate_that_does_not_follow_from_the_optimizer_is_a_series(tmp_path):
    for optimizer, rate in (("adamw", 0.001), ("adamw", 0.002), ("sgd", 0.1)):
        make_run(resolved(tmp_path, f"optimizer={optimizer}", f"lr.base={rate}"))
    labels = [each.label for each in compare(tmp_path / "study").by_ranks()]
    assert labels == ["AdamW, lr 0.001", "AdamW, lr 0.002", "SGD, lr 0.1"]


def test_models_are_told_apart_by_name_and_by_what_was_overridden(tmp_path):
    make_run(resolved(tmp_path, "model=gpt2_tiny"))
    make_run(resolved(tmp_path, "model=gpt2_tiny", "model.config.n_layer=2"))
    make_run(resolved(tmp_path, "model=llama_tiny"))
    labels = [each.label for each in compare(tmp_path / "study").by_ranks()]
    assert len(set(labels)) == 3 and "llama_tiny" in labels[2] and "n layer 2" in " ".join(labels)


def test_strong_and_weak_scaling_are_series_of_their_own(tmp_path):
    for batch in ("strong", "weak"):
        for world in (1, 2):
            make_run(resolved(tmp_path, f"batch={batch}", world_size=world))
    assert [each.label for each in compare(tmp_path / "study").by_ranks()] == ["strong", "weak"]


def test_runs_on_other_hardware_are_not_the_same_point(tmp_path):
    config = resolved(tmp_path)
    make_run(config)
    other = {**ENVIRONMENT, "hardware": {"cpu": "a test CPU", "cores": 2, "gpus": ["A GPU", "A GPU"]}}
    make_run(replace(config, study="other"), environment=other, tokens_per_s=90_000.0)
    labels = [each.label for each in compare(tmp_path / "study", tmp_path / "other").by_ranks()]
    assert labels == ["A GPU", "a test CPU, 2 cores"]


def test_a_seed_that_changes_the_corpus_makes_no_series_but_changed_data_do(tmp_path):
    for seed in (0, 1):
        make_run(resolved(tmp_path, f"seed={seed}"), environment={**ENVIRONMENT, "corpus_fingerprint": f"seed{seed}"})
    assert len(compare(tmp_path / "study").by_ranks()) == 1
    make_run(resolved(tmp_path, study="later"), environment={**ENVIRONMENT, "corpus_fingerprint": "changed!"})
    labels = [each.label for each in compare(tmp_path / "study", tmp_path / "later").by_ranks()]
    assert "corpus changed!" in labels


def test_a_refused_run_joins_the_series_it_was_meant_for(tmp_path):
    for world in (1, 2):
        make_run(resolved(tmp_path, "batch.global_size=32", world_size=world))
    refused = composed(tmp_path, "batch.global_size=32", "launch.world_size=3")
    make_run(refused, "failed", "batch.global_size=32: not divisible by 3 ranks; nearest valid: 30 or 33")
    matrix = status_matrix(compare(tmp_path / "study"))
    assert matrix.columns == ["1", "2", "3"] and len(matrix.rows) == 1
    assert matrix.cells == [[{"completed": 1}, {"completed": 1}, {"failed": 1}]]


# Curves


def scaling_study(root: Path, **summary: Any) -> Path:
    """Strong and weak scaling of stage 0 over 1, 2, 4 ranks, three seeds with one slower and one faster."""
    for batch in ("strong", "weak"):
        for world, rate in ((1, 1000.0), (2, 1800.0), (4, 2400.0)):
            for seed, factor in enumerate((0.9, 1.0, 1.1)):
                config = resolved(root, f"batch={batch}", f"seed={seed}", world_size=world)
                make_run(config, tokens_per_s=rate * factor, final_loss=2.0 + seed, **summary)
    return root / "study"


def test_speed_up_and_efficiency_are_over_the_smallest_world(tmp_path):
    series = compare(scaling_study(tmp_path)).by_ranks()
    rates = throughput.tokens_per_s(series)
    assert lines(rates)["all runs"].y == [1000.0, 1800.0, 2400.0]
    assert lines(rates)["all runs"].low == pytest.approx([900.0, 1620.0, 2160.0])
    assert isinstance(rates, Curve) and [panel.title.split(":")[0] for panel in rates.panels] == [
        "strong scaling",
        "weak scaling",
    ]
    assert lines(throughput.speed_ups(series))["all runs"].y == pytest.approx([1.0, 1.8, 2.4])
    for panel in (0, 1):
        assert lines(throughput.efficiencies(series), panel)["all runs"].y == pytest.approx([1.0, 0.9, 0.6])


def test_the_baseline_is_the_smallest_world_that_completed(tmp_path):
    make_run(resolved(tmp_path, world_size=1), "oom", "CUDA out of memory")
    for world, rate in ((2, 1000.0), (4, 1500.0)):
        make_run(resolved(tmp_path, world_size=world), tokens_per_s=rate)
    comparison = compare(tmp_path / "study")
    line = lines(throughput.efficiencies(comparison.by_ranks()))["all runs"]
    assert (line.x, line.y) == ([2, 4], pytest.approx([1.0, 0.75]))
    assert [row["efficiency"] for row in run_rows(comparison)] == [None, pytest.approx(1.0), pytest.approx(0.75)]
    assert [(mark.x, mark.status, mark.count) for mark in line.marks] == [(1, "oom", 1)]


def test_without_a_second_world_there_is_no_scaling_curve(tmp_path):
    make_run(resolved(tmp_path, world_size=2))
    series = compare(tmp_path / "study").by_ranks()
    left_out = throughput.efficiencies(series)
    assert isinstance(left_out, LeftOut) and left_out.why.startswith("every run has 2 ranks")


def test_a_series_with_one_world_has_no_efficiency(tmp_path):
    for world in (1, 2):
        make_run(resolved(tmp_path, "zero=stage1", world_size=world))
    make_run(resolved(tmp_path, "zero=stage3", world_size=2))
    found = throughput.efficiencies(compare(tmp_path / "study").by_ranks())
    assert list(lines(found)) == ["ZeRO-1", "ideal"]
    assert "No baseline, hence no line: ZeRO-3" in found.note


def test_time_to_loss_efficiency_counts_what_a_large_batch_wastes(tmp_path):
    series = compare(scaling_study(tmp_path, critical_batch_size=32.0)).by_ranks()
    found = throughput.time_to_loss_efficiencies(series)
    assert lines(found, 0)["all runs towards a loss"].y == pytest.approx([0.5, 0.45, 0.3])  # B = 32 everywhere
    assert lines(found, 1)["all runs towards a loss"].y == pytest.approx([2 / 3, 0.45, 0.2])  # B = 16, 32, 64
    assert isinstance(throughput.time_to_loss_efficiencies([]), LeftOut)


def test_step_time_shows_median_and_90th_percentile(tmp_path):
    comparison = compare(scaling_study(tmp_path))
    line = lines(resources.step_times(comparison, comparison.by_ranks()))["all runs"]
    assert line.y == pytest.approx([32 * 128 / 1000, 32 * 128 / 1800, 32 * 128 / 2400])
    assert line.high == pytest.approx([1.2 * value for value in line.y])


def test_memory_falls_with_the_ranks_as_sharded_and_the_ideal_is_one_over_n(tmp_path):
    for stage in range(4):
        for world in (1, 2, 4):
            make_run(resolved(tmp_path, f"zero=stage{stage}", world_size=world))
    comparison = compare(tmp_path / "study")
    found = resources.memory(comparison, comparison.by_ranks())
    assert isinstance(found, Curve)
    sync = [title for key, title in resources.MEMORY.items() if key != "pending_gradient_bytes"]
    assert [panel.title for panel in found.panels] == sync
    whole = 4.0 * PARAMETERS
    parameters = lines(found, 0)
    assert parameters["ZeRO-2"].y == [whole] * 3
    assert parameters["ZeRO-3"].y == parameters["ideal 1/N"].y == [whole, whole / 2, whole / 4]
    assert lines(found, 2)["ZeRO-1"].y == [2 * whole, whole, whole / 2]


def test_the_ideal_share_is_of_what_is_held_without_sharding(tmp_path):
    for stage, held in ((0, [100.0, 100.0]), (3, [150.0, 75.0])):  # stage 3 alone holds copies of its own
        for world, value in zip((1, 2), held, strict=True):
            make_run(resolved(tmp_path, f"zero=stage{stage}", world_size=world), grad_bytes=value)
    comparison = compare(tmp_path / "study")
    found = lines(resources.memory(comparison, comparison.by_ranks()), 1)
    assert (found["ZeRO-3"].y, found["ideal 1/N"].y) == ([150.0, 75.0], [100.0, 50.0])


def test_what_does_not_change_memory_makes_no_line(tmp_path):
    for rate in (0.001, 0.002):
        for world in (1, 2):
            for mode, factor in (("none", 1.0), ("full", 0.5)):
                config = resolved(tmp_path, f"lr.base={rate}", f"checkpointing={mode}", world_size=world)
                make_run(config, peak_memory_bytes=factor * (1 + rate) * 1e9)
    comparison = compare(tmp_path / "study")
    found = lines(resources.memory(comparison, comparison.by_ranks()), 3)
    assert [label for label in found if label != "ideal 1/N"] == ["no checkpointing", "full checkpointing"]


def test_bytes_sent_by_stage_and_operation(tmp_path):
    for stage in (0, 3):
        make_run(resolved(tmp_path, f"zero=stage{stage}", "lr.base=0.001", world_size=2))
        make_run(resolved(tmp_path, f"zero=stage{stage}", "lr.base=0.002", world_size=2))
    found = resources.communication(compare(tmp_path / "study"))
    size = 4.0 * PARAMETERS
    assert isinstance(found, Bars) and found.rows == ["ZeRO-0", "ZeRO-3"]
    assert found.panels[0].parts == {"all_gather": [0, size], "all_reduce": [size, 0], "reduce_scatter": [0, size]}


def test_loss_curves_are_medians_over_seeds_with_the_spread(tmp_path):
    for seed, shift in enumerate((0.0, 0.1, 0.5)):
        config = resolved(tmp_path, f"seed={seed}")
        make_run(config, rows=metric_rows(config, tokens_per_s=1000.0 * (seed + 1), shift=shift))
    comparison = compare(tmp_path / "study")
    line = lines(losses.against(comparison, "samples"))["all runs"]
    assert line.x[:2] == [32, 64] and len(line.x) == 150
    assert line.y[0] == pytest.approx(loss_at(32) + 0.1)
    assert (line.low[0], line.high[0]) == pytest.approx((loss_at(32), loss_at(32) + 0.5))
    wall = lines(losses.against(comparison, "wall_s"))["all runs"]
    assert wall.x[0] == pytest.approx(32 * 128 / 2000)
    assert isinstance(losses.against(comparison, "sim_time_s"), LeftOut)


def test_long_loss_curves_are_averaged_over_equal_numbers_of_updates(tmp_path):
    config = resolved(tmp_path, "train.steps=500")
    make_run(config)
    line = lines(losses.against(compare(tmp_path / "study"), "samples"))["all runs"]
    assert len(line.x) == 167 and line.x[0] == 64  # means over 3, the last over 2
    assert line.y[0] == pytest.approx(sum(loss_at(32 * step) for step in (1, 2, 3)) / 3)
    assert line.x[-1] == pytest.approx(32 * 499.5)


def test_a_diverged_curve_ends_with_a_mark_at_its_last_finite_loss(tmp_path):
    config = resolved(tmp_path)
    rows = [*metric_rows(config, steps=5), {"step": 6, "samples": 192, "loss": None, "wall_s": 30.0}]
    make_run(config, "diverged", "loss is not finite at update 6", rows=rows)
    line = lines(losses.against(compare(tmp_path / "study"), "samples"))["all runs"]
    assert line.x == [32, 64, 96, 128, 160]
    [mark] = line.marks
    assert (mark.status, mark.x, mark.y) == ("diverged", 160, pytest.approx(loss_at(160)))


def test_final_loss_against_batch_size_by_rule(tmp_path):
    for rule in ("none", "linear"):
        for batch in (8, 32, 128):
            config = resolved(tmp_path, f"lr.rule={rule}", f"batch.global_size={batch}")
            if (rule, batch) == ("linear", 128):
                make_run(config, "diverged", "loss exploded")
            else:
                make_run(config, final_loss=batch / 10)
    found = lines(losses.against_batch_size(compare(tmp_path / "study")))
    assert (found["no rule"].x, found["no rule"].y) == ([8, 32, 128], [0.8, 3.2, 12.8])
    assert (found["linear"].x, [(mark.x, mark.status) for mark in found["linear"].marks]) == (
        [8, 32],
        [(128, "diverged")],
    )


def test_the_status_matrix_holds_every_run(tmp_path):
    endings = {1: "oom", 2: "diverged", 4: "failed", 8: "timeout", 16: "completed"}
    for world, status in endings.items():
        for seed in (0, 1):
            config = resolved(tmp_path, f"seed={seed}", world_size=world)
            make_run(config, "completed" if seed else status)
    matrix = status_matrix(compare(tmp_path / "study"))
    assert matrix.columns == ["1", "2", "4", "8", "16"]
    assert matrix.cells == [
        [{status: 1, "completed": 1} if status != "completed" else {"completed": 2} for status in endings.values()]
    ]


def test_a_long_status_matrix_folds_only_what_completed():
    cells = [[{"completed": 2}] if row else [{"oom": 1, "completed": 1}] for row in range(100)]
    rows, folded, _ = fold(Matrix("status", "", "", ["1"], [f"lr {row}" for row in range(100)], cells))
    assert rows == ["99 series, all completed", "lr 0"]
    assert folded == [[{"completed": 198}], [{"oom": 1, "completed": 1}]]


def test_many_lines_are_divided_by_words_before_sizes():
    values = [
        {"lr.rule": rule, "batch.global_size": size} for rule in ("none", "sqrt") for size in (8, 16, 32, 64, 128, 256)
    ]
    panel = Panel("", "x", "y", [Line(str(each), [1.0], [1.0], [1.0], [1.0], values=each) for each in values])
    parts = split_panel(panel)
    assert [part.title for part in parts] == ["no rule", "sqrt"]
    assert [line.label for line in parts[1].lines] == [f"batch {size}" for size in (8, 16, 32, 64, 128, 256)]


def test_tick_labels_do_not_touch():
    assert apart([8, 16, 32, 64], [33, 128]) == [8, 16, 32, 64, 128]


# Bad input


def test_damaged_runs_are_named_and_skipped_and_the_others_reported(tmp_path, capsys):
    good = make_run(resolved(tmp_path, "seed=99"))
    damage = {
        "skipped, no status.json": lambda path: (path / "status.json").unlink(),
        "status.json cannot be read": lambda path: (path / "status.json").write_text('{"status": "compl'),
        "status.json holds no known status": lambda path: write_json(path / "status.json", {"status": "done"}),
        "skipped, no config.yaml": lambda path: (path / "config.yaml").unlink(),
        "config.yaml cannot be read": lambda path: (path / "config.yaml").write_bytes(b"\xff\xfe: ["),
        "config lacks batch": lambda path: drop_key(path, "batch:"),
        "config has unknown keys": lambda path: (path / "config.yaml").open("a").write("colour: red\n"),
        "completed, but without summary.json": lambda path: (path / "summary.json").unlink(),
        "summary.json cannot be read": lambda path: (path / "summary.json").write_text(""),
        "summary.json holds no object": lambda path: (path / "summary.json").write_text("[]"),
        "summary lacks final_loss": lambda path: edit_summary(path, "final_loss", None),
        "tokens_per_s='fast' is no number": lambda path: edit_summary(path, "tokens_per_s", "fast"),
        "world_size=7, but the config says 1": lambda path: edit_summary(path, "world_size", 7),
        "metrics.jsonl has a damaged row": lambda path: (path / "metrics.jsonl").write_text('{"samp\n{"samples": 1}\n'),
        "row 1 of metrics.jsonl has no samples": lambda path: (path / "metrics.jsonl").write_text('{"loss": 1}\n'),
        "env.json holds no object": lambda path: (path / "env.json").write_text("3"),
    }
    for seed, harm in enumerate(damage.values()):
        harm(make_run(resolved(tmp_path, f"seed={seed}")).path)
    study = tmp_path / "study"
    (study / "empty").mkdir()
    (study / "foreign").mkdir()
    (study / "foreign" / "notes.txt").write_text("not ours")
    (study / "notes.txt").write_text("not a folder")
    (study / ".sweep").mkdir()
    report = write_report([study])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(damage) + 2
    for why in (*damage, "skipped, empty", "not a run: no config.yaml"):
        assert sum(why in line for line in told) == 1, why
    assert [row["run"] for row in table(report)] == [good.path.name]
    assert str(study / "empty") in (report / "index.html").read_text()


def drop_key(path: Path, key: str) -> None:
    text = (path / "config.yaml").read_text()
    start = text.index(f"\n{key}") + 1
    end = start + re.search(r"\n(?! )", text[start:]).end()
    (path / "config.yaml").write_text(text[:start] + text[end:])


def edit_summary(path: Path, key: str, value: Any) -> None:
    summary = json.loads((path / "summary.json").read_text())
    summary.pop(key)
    (path / "summary.json").write_text(json.dumps(summary | ({} if value is None else {key: value})))


def test_a_half_written_last_row_costs_only_itself(tmp_path):
    run = make_run(resolved(tmp_path), "killed", rows=metric_rows(resolved(tmp_path), steps=3))
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "samp')
    [record], [remark] = read_runs([tmp_path / "study"])
    assert list(record.metrics["samples"]) == [32, 64, 96]
    assert "half-written" in str(remark)


def test_numbers_that_json_does_not_have_are_no_measurement(tmp_path):
    run = make_run(resolved(tmp_path))
    text = (run.path / "summary.json").read_text()
    (run.path / "summary.json").write_text(re.sub(r'"eval_loss": [\d.]+', '"eval_loss": NaN', text))
    [record], _ = read_runs([tmp_path / "study"])
    assert record.number("eval_loss") is None


def test_earlier_records_are_left_out_and_a_path_given_twice_counts_once(tmp_path):
    config = resolved(tmp_path)
    make_run(config, tokens_per_s=1.0)
    run = make_run(config, tokens_per_s=2.0)  # moves the first aside
    assert run.path.with_name(f"{run.path.name}.1").exists()
    records, skipped = read_runs([tmp_path / "study", run.path, tmp_path / "study"])
    assert [record.number("tokens_per_s") for record in records] == [2.0] and not skipped


def test_a_running_run_whose_process_is_gone_reads_as_killed(tmp_path):
    run = make_run(resolved(tmp_path), "running")
    status = json.loads((run.path / "status.json").read_text())
    write_json(run.path / "status.json", status | {"pid_started": status["pid_started"] - 1000})
    [record], _ = read_runs([run.path])
    assert record.status == "killed"


def test_errors_are_one_line_and_exit_1(tmp_path):
    (tmp_path / "study").mkdir()
    for arguments, told in (
        ([str(tmp_path / "missing")], "cannot be read"),
        ([str(tmp_path / "study")], "no run to report on"),
        (["--wandb", "only-a-project", "--group", "study"], "must be ENTITY/PROJECT"),
    ):
        done = command(*arguments)
        assert done.returncode == 1 and done.stdout == ""
        assert len(done.stderr.splitlines()) == 1 and told in done.stderr
    for arguments in ([], ["--wandb", "a/b"], ["--group", "study", "runs"], ["--upload", "sometimes", "runs"]):
        assert command(*arguments).returncode == 2


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "harness.report", *arguments], cwd=root, capture_output=True, text=True, timeout=120
    )


# What is written


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The report of strong and weak scaling and a run that ran out of memory, also logged to W&B offline."""
    root = tmp_path_factory.mktemp("runs")
    study = scaling_study(root)
    make_run(resolved(root, world_size=8), "oom", "CUDA out of memory on rank 3")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        report = write_report([study], upload="offline")
    assert report == study / "report"
    return report


def test_a_report_is_complete_and_its_table_has_the_numbers(written):
    report = written
    slugs = (
        "status tokens_per_s speed_up efficiency step_time memory_per_rank communication loss_samples loss_wall_time"
    )
    slugs += " final_loss_batch_size extrapolation"
    expected = {f"{slug}.{suffix}" for slug in slugs.split() for suffix in ("png", "svg")}
    assert {path.name for path in report.iterdir()} == expected | {"table.csv", "table.md", "index.html", "wandb"}
    rows = table(report)
    assert len(rows) == 19
    [row] = [r for r in rows if (r["scaling"], r["world_size"], r["seed"]) == ("weak", "4", "2")]
    assert float(row["tokens_per_s"]) == pytest.approx(2640.0)
    assert (float(row["speed_up"]), float(row["efficiency"])) == pytest.approx((2.64, 0.66))
    assert (row["global_batch_size"], row["micro_batch_size"], row["zero_stage"]) == ("64", "16", "0")
    assert float(row["predicted.tokens_per_s"]) == 900.0
    assert float(row["residual.tokens_per_s"]) == pytest.approx(2640 / 900 - 1)
    assert float(row["comm_bytes_per_step.all_reduce"]) == 4 * PARAMETERS
    assert row["hardware"] == "a test CPU, 2 cores" and "deepspeed 0.19.8" in row["versions"]
    [lost] = [r for r in rows if r["status"] == "oom"]
    assert (lost["reason"], lost["tokens_per_s"]) == ("CUDA out of memory on rank 3", "")
    markdown = (report / "table.md").read_text()
    assert "| weak | weak | 4 | 64 | 3 | 3 completed | 2400 (2160 to 2640) |" in markdown
    assert "| 2.40 | 60.0 |" in markdown


def test_the_page_needs_no_network_and_says_what_is_left_out(tmp_path):
    make_run(resolved(tmp_path), reason="")
    make_run(resolved(tmp_path, "seed=1"), "failed", 'ValueError: <script>alert("x")</script>')
    html = (write_report([tmp_path / "study"]) / "index.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources and all(not re.match(r"(https?:)?//", source) for source in sources)
    assert html.count("data:image/png;base64,") >= 3
    assert "Scaling efficiency against ranks: every run has 1 rank; it needs two world sizes" in html
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_every_picture_names_hardware_versions_and_units(written):
    for path in written.glob("*.svg"):
        text = path.read_text()
        for part in ("a test CPU, 2 cores", "deepspeed 0.19.8", "commit 0123456789"):
            assert part in text, (path.name, part)
    for slug, label in {
        "tokens_per_s": "tokens/s, all ranks",
        "step_time": "step time (s)",
        "memory_per_rank": "MiB per rank",
        "communication": "MiB per update and rank",
        "loss_samples": "samples (sequences)",
        "loss_wall_time": "wall time (s)",
        "efficiency": "ranks (world size)",
    }.items():
        assert label in (written / f"{slug}.svg").read_text()


def test_a_new_report_removes_only_pictures_of_an_older_one(tmp_path):
    for world in (1, 2):
        make_run(resolved(tmp_path, world_size=world))
    out = tmp_path / "out"
    assert write_report([tmp_path / "study"], out) == out
    assert (out / "efficiency.png").exists()
    (out / "mine.png").write_bytes(b"keep")
    make_run(resolved(tmp_path, study="single"))
    write_report([tmp_path / "single"], out)
    assert not (out / "efficiency.png").exists() and (out / "mine.png").exists()
    assert not list(tmp_path.glob(".report.*"))


def test_several_studies_share_one_report(tmp_path):
    make_run(resolved(tmp_path, world_size=1, study="small"))
    make_run(resolved(tmp_path, world_size=2, study="big"), tokens_per_s=1500.0)
    report = write_report([tmp_path / "big", tmp_path / "small"])
    assert report == tmp_path / "big" / "report"
    assert sorted((row["study"], row["efficiency"]) for row in table(report)) == [("big", "0.75"), ("small", "1.0")]


def test_a_report_of_runs_none_of_which_completed_is_written(tmp_path):
    make_run(resolved(tmp_path), "oom", "out of memory", rows=[])
    make_run(composed(tmp_path, "batch.global_size=33"), "failed", "refused")
    report = write_report([tmp_path / "study"])
    assert [row["status"] for row in table(report)] == ["oom", "failed"]
    assert (report / "status.png").exists()


def test_help_is_fast_and_imports_neither_torch_nor_wandb():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert command("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    code = "import sys, harness.report.study; sys.exit(bool({'torch', 'wandb', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


# W&B


def recorded_run(run_id: str, config: Any, state: str = "finished", rows: Any = (), **summary: Any) -> Any:
    """A run as wandb's public API holds it, from the attributes that its server answers with."""
    from dataclasses import asdict

    from wandb.apis.public import Run

    class Recorded(Run):
        def scan_history(self, *args: Any, **kwargs: Any) -> Any:
            return iter([{"_step": step, "_timestamp": 1.0, **row} for step, row in enumerate(rows)])

    values = {key: {"value": value} for key, value in asdict(config).items()} | {"_wandb": {"value": {}}}
    attributes = {
        "id": f"storage-{run_id}", "name": run_id, "displayName": f"name-{run_id}", "state": state,
        "group": config.study, "jobType": "zero0", "config": json.dumps(values | {"env": {"value": ENVIRONMENT}}),
        "summaryMetrics": json.dumps(summary | {"_runtime": 12, "_step": 150}), "historyLineCount": len(rows),
    }  # fmt: skip
    return Recorded(None, "someone", "harness", run_id, attrs=attributes, lazy=False)


class Api:
    """What ``wandb.Api()`` answers, from recorded runs."""

    def __init__(self, found: list[Any]):
        self.found = found
        self.asked: tuple[str, dict[str, Any]] | None = None

    def runs(self, path: str, **options: Any) -> list[Any]:
        self.asked = path, options
        return self.found


def test_the_same_report_from_disk_and_from_wandb(tmp_path, monkeypatch):
    found = []
    for world, rate in ((1, 1000.0), (2, 1800.0)):
        for seed in (0, 1):
            config = resolved(tmp_path, f"seed={seed}", world_size=world)
            rows = metric_rows(config, tokens_per_s=rate)
            make_run(config, rows=rows, tokens_per_s=rate)
            found.append(recorded_run(f"{world}{seed}", config, rows=rows, **summary_of(config, rate)))
    config = resolved(tmp_path, "seed=2", world_size=2)
    make_run(config, "oom", "out of memory", rows=[])
    found.append(recorded_run("oom", config, "failed", status="oom", reason="out of memory"))
    api = Api(found)
    monkeypatch.setattr("wandb.Api", lambda: api)
    from harness.report.study import report_from_wandb

    remote = report_from_wandb("someone/harness", "study", tmp_path / "remote")
    assert api.asked == ("someone/harness", {"filters": {"group": "study"}, "order": "+created_at", "lazy": False})
    local = write_report([tmp_path / "study"], tmp_path / "local")
    assert {path.name for path in remote.iterdir()} == {path.name for path in local.iterdir()}
    mine, theirs = ([{k: v for k, v in row.items() if k != "run"} for row in table(path)] for path in (local, remote))
    assert theirs == mine


def test_what_is_null_on_disk_may_be_absent_in_wandb(tmp_path):
    config = resolved(tmp_path)
    known = {key: value for key, value in summary_of(config, final_loss=None).items() if value is not None}
    [record], skipped = wandb_api.to_runs([recorded_run("run", config, **known)])
    assert record.number("final_loss") is None and not skipped


def test_wandb_runs_that_are_not_ours_are_named_and_skipped(tmp_path):
    config = resolved(tmp_path)
    good = recorded_run("good", config, rows=metric_rows(config, steps=2), **summary_of(config))
    foreign = recorded_run("foreign", config, **summary_of(config))
    foreign._attrs["config"] = {"learning_rate": 0.1}
    report = recorded_run("report", config)
    report._attrs["jobType"] = "report"
    unfinished = recorded_run("crashed", resolved(tmp_path, "seed=1"), "crashed", loss="NaN")
    records, skipped = wandb_api.to_runs([good, foreign, report, unfinished])
    assert [(record.name, record.status) for record in records] == [
        ("name-good", "completed"),
        ("name-crashed", "killed"),
    ]
    assert [str(each).split(":")[0] for each in skipped] == ["name-foreign (foreign)"]
    assert list(records[0].metrics["samples"]) == [32, 64]


def test_of_two_wandb_runs_of_the_same_config_the_newest_counts(tmp_path):
    config = resolved(tmp_path)
    first = recorded_run("first", config, **summary_of(config, 1.0))
    second = recorded_run("second", config, **summary_of(config, 2.0))
    records, _ = wandb_api.to_runs([first, second])
    assert [record.number("tokens_per_s") for record in records] == [2.0]


def test_flat_keys_and_not_finite_numbers_of_wandb_are_understood(tmp_path):
    config = resolved(tmp_path)
    summary = summary_of(config, final_loss="NaN")
    summary["comm_bytes_per_step/all_reduce"] = 8
    del summary["comm_bytes_per_step"]
    rows = [{"samples": 32, "loss": "Infinity", "wall_s": 1.0}, {"samples": 64, "wall_s": 2.0}, {"gpu": 1}]
    [record], _ = wandb_api.to_runs([recorded_run("run", config, rows=rows, **summary)])
    assert record.number("final_loss") is None
    assert record.summary["comm_bytes_per_step"] == {"all_reduce": 8}
    assert [str(loss) for loss in record.metrics["loss"]] == ["nan", "nan"]


def test_an_offline_upload_can_be_read_back_with_wandbs_own_reader(written):
    [log] = written.glob("wandb/offline-run-*/run-*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    read = subprocess.run(inspect, capture_output=True, text=True, timeout=60)
    records = [json.loads(line) for line in read.stdout.splitlines()]
    [run] = [record["run"] for record in records if record["type"] == "run"]
    assert (run["job_type"], run["run_group"], run["display_name"]) == ("report", "study", "report-study")
    history = read.stdout
    for key in ("runs", "pictures/efficiency", "pictures/status", "curves/efficiency_1", "curves/loss_samples"):
        assert key in history
    [logged] = log.parent.glob("files/media/table/runs_*.table.json")
    content = json.loads(logged.read_text())
    rows = table(written)
    assert content["columns"] == list(rows[0]) and len(content["data"]) == len(rows) == 19
    rate = content["columns"].index("tokens_per_s")
    assert [row[rate] for row in content["data"]] == [
        float(row["tokens_per_s"]) if row["tokens_per_s"] else None for row in rows
    ]
    [efficiency] = log.parent.glob("files/media/table/curves/efficiency_1_*.table.json")
    points = [row for row in json.loads(efficiency.read_text())["data"] if "all runs" in row]
    assert sorted(value for row in points for value in row if isinstance(value, float))[:1] == [pytest.approx(0.6)]


def test_no_folder_is_refused():
    with pytest.raises(ConfigError, match="name at least one"):
        write_report([])


# Speed


MEASURED = """
import runpy, sys
sys.argv = ["harness.report", sys.argv[1]]
try:
    runpy.run_module("harness.report", run_name="__main__")
finally:
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak)
"""


def measure_report(study: Path) -> tuple[float, float]:
    """Seconds and the peak memory in GiB of the command in a process of its own; what the kernel says of a child that
    has ended includes its parent's."""
    start = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, str(study)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, int(done.stdout.split()[-1]) / 2**20


def test_a_report_over_100_runs_is_fast_and_small(tmp_path):
    assert make_study(tmp_path, seeds=5, rates=(0.002,)) == 100
    seconds, gib = measure_report(tmp_path / "large")
    assert len(table(tmp_path / "large" / "report")) == 100
    assert seconds <= 20 and gib <= 1


@pytest.mark.slow
def test_a_report_over_1000_runs_takes_20_seconds_and_1_gib_at_most(tmp_path):
    assert make_study(tmp_path, seeds=10, rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2)) == 1000
    seconds, gib = measure_report(tmp_path / "large")
    assert len(table(tmp_path / "large" / "report")) == 1000
    assert seconds <= 20 and gib <= 1
