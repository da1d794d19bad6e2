"""From runs to a report: reads, compares, draws and writes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness.config import ConfigError
from harness.report import (
    extrapolation,
    losses,
    page,
    pictures,
    predicted,
    resources,
    staleness,
    status,
    table,
    throughput,
)  # fmt: skip
from harness.report.curves import LeftOut, Picture
from harness.report.record import Run
from harness.report.runs import Skipped, is_run, read_runs
from harness.report.series import Comparison

SHOWN = ("deepspeed", "torch", "transformers", "python")  # versions on every picture; the page has all of them


def report_from_disk(paths: list[Path], out: Path | None = None, upload: str = "disabled") -> Path:
    """See :func:`harness.report.write_report`."""
    if not paths:
        raise ConfigError("no folder given; name at least one, e.g. runs/STUDY")
    runs, skipped = read_runs(paths)
    if out is None:
        first = paths[0].resolve()
        out = (first.parent if is_run(first) else first) / "report"
    where = " ".join(map(str, paths))
    return write(runs, skipped, out, upload, where)


def report_from_wandb(project: str, group: str, out: Path | None = None, upload: str = "disabled") -> Path:
    """The same report from the runs of a group in W&B; by default in ``runs/GROUP/report``.

    Raises:
        ConfigError: in one line, also when W&B cannot be reached.
    """
    from harness.report.wandb_api import read_group

    runs, skipped = read_group(project, group)
    return write(runs, skipped, out or Path("runs") / group / "report", upload, f"{project}, group {group}")


def write(runs: list[Run], skipped: list[Skipped], out: Path, upload: str, where: str) -> Path:
    """Write the report of these runs into ``out``; an earlier report's pictures that no longer apply are removed."""
    for each in skipped:
        print(f"report: {each}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"{where}: no run to report on ({len(skipped)} skipped); give runs/STUDY or a run directory")
    comparison = Comparison(runs)
    results = build_pictures(comparison)
    made: list[Picture] = [each for each in results if not isinstance(each, LeftOut)]
    studies = sorted({run.study for run in runs})
    title = ", ".join(studies)
    rows = table.run_rows(comparison)
    points = table.point_rows(comparison)
    origin = environment_text(runs, SHOWN)
    facts = [
        f"{count_text(runs)} Written {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC.",
        environment_text(runs),
    ]
    facts.append(table.constant_facts(comparison))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=out.parent, prefix=".report."))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror or error})") from error
    try:
        for picture in made:
            pictures.draw(picture, title, origin, fresh)
        left_out = [each for each in results if isinstance(each, LeftOut)]
        failures = [run for run in runs if run.status not in ("completed", "running")]
        content = page.Content(f"Study {title}", facts, made, left_out, points, failures, skipped)
        (fresh / "table.csv").write_text(table.to_csv(rows))
        (fresh / "table.md").write_text(table.to_markdown(points, f"Study {title}", facts))
        (fresh / "index.html").write_text(page.render(content, fresh))
        move_into_place(fresh, out, [each.slug for each in results])
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if upload != "disabled":
        from harness.report.upload import upload_report

        upload_report(out, made, rows, runs, upload)
    return out


def build_pictures(comparison: Comparison) -> list[Picture | LeftOut]:
    """The data of all pictures, in the order of the page."""
    series = comparison.by_ranks()
    return [
        status.status_matrix(comparison),
        throughput.tokens_per_s(series),
        throughput.speed_ups(series),
        throughput.efficiencies(series),
        throughput.time_to_loss_efficiencies(series),
        resources.step_times(comparison, series),
        resources.memory(comparison, series),
        resources.communication(comparison),
        predicted.against_measured(comparison),
        extrapolation.step_times(series),
        losses.against(comparison, "samples"),
        losses.against(comparison, "wall_s"),
        losses.against(comparison, "updates"),
        losses.against(comparison, "sim_time_s"),
        staleness.histogram(comparison),
        staleness.token_overheads(comparison),
        staleness.break_even(comparison),
        losses.against_batch_size(comparison),
    ]


def move_into_place(fresh: Path, out: Path, slugs: list[str]) -> None:
    """Each file appears whole; only what a report writes is replaced or removed."""
    out.mkdir(exist_ok=True)
    for slug in slugs:
        for suffix in ("png", "svg"):
            if not (fresh / f"{slug}.{suffix}").exists():
                (out / f"{slug}.{suffix}").unlink(missing_ok=True)
    for path in sorted(fresh.iterdir(), key=lambda path: path.name == "index.html"):
        os.replace(path, out / path.name)


def count_text(runs: list[Run]) -> str:
    counts = Counter(run.status for run in runs)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {', '.join(f'{n} {s}' for s, n in counts.most_common())}."


def environment_text(runs: list[Run], packages: tuple[str, ...] = ()) -> str:
    """Hardware, versions and commits of all runs in one line; where runs differ, each of their values."""
    hardware = sorted({run.environment.hardware for run in runs if run.environment.hardware})
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.environment.versions:
            if not packages or name in packages:
                versions.setdefault(name, set()).add(version)
    commits = sorted({run.environment.git_commit[:10] for run in runs if run.environment.git_commit})
    parts = [
        f"Hardware: {' and '.join(hardware) or 'not recorded'}",
        ", ".join(f"{name} {'/'.join(sorted(found))}" for name, found in sorted(versions.items()))
        or "versions not recorded",
    ]
    if commits:
        parts.append(f"commit {'/'.join(commits[:3])}{' …' if len(commits) > 3 else ''}")
    return "; ".join(parts)
