"""Sends a report to W&B as a run of its own: the table, the curves as line series, the pictures."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from harness.config import WandbConfig
from harness.report.curves import Curve, Picture
from harness.report.record import Run
from harness.report.table import Row
from harness.tracking import decide_mode

Content = dict[str, Any]
MOST_ROWS = 10_000  # of a table behind a chart, by W&B's limit


def upload_report(folder: Path, pictures: list[Picture], rows: list[Row], runs: list[Run], mode: str) -> str:
    """Log the report in ``folder``; returns the id of its run (job_type ``report``, group = study).

    Args:
        rows: the rows of table.csv.
        runs: where the project and entity are taken from: the last run's config.
        mode: ``auto``, ``offline`` or ``online``; offline needs no account and is kept in ``folder``/wandb.
    """
    import wandb

    config = runs[-1].config
    studies = sorted({run.study for run in runs})
    with wandb.init(
        project=config.get("wandb.project") or "harness",
        entity=config.get("wandb.entity"),
        group=studies[0],
        job_type="report",
        name=f"report-{studies[0]}",
        id=uuid.uuid4().hex[:8],
        dir=str(folder),
        mode=decide_mode(WandbConfig(mode=mode)),  # type: ignore[arg-type]
        config={"studies": studies, "runs": len(runs)},
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off"),
    ) as run:
        content: Content = {"runs": wandb.Table(columns=list(rows[0]), data=table_data(rows))}
        for picture in pictures:
            content[f"pictures/{picture.slug}"] = wandb.Image(
                str(folder / f"{picture.slug}.png"), caption=picture.title
            )
            if isinstance(picture, Curve):
                content |= line_series(picture)
        run.log(content)
        return run.id


def table_data(rows: list[Row]) -> list[list[Any]]:
    """Cells of one type per column, as W&B's tables want them: numbers as floats, everything else as text."""
    numeric = {
        key: all(isinstance(row[key], int | float | None) and not isinstance(row[key], bool) for row in rows)
        for key in rows[0]
    }
    return [
        [value if value is None else float(value) if numeric[key] else str(value) for key, value in row.items()]
        for row in rows
    ]


def line_series(curve: Curve) -> Content:
    """A chart of W&B's own per panel."""
    import wandb

    charts: Content = {}
    for number, panel in enumerate(curve.panels):
        lines = [line for line in panel.lines if line.x]
        every = -(-sum(len(line.x) for line in lines) // MOST_ROWS)
        title = ": ".join(text for text in (curve.title, panel.title, panel.y_label) if text)
        name = f"curves/{curve.slug}" + (f"_{number + 1}" if len(curve.panels) > 1 else "")
        charts[name] = wandb.plot.line_series(
            xs=[line.x[::every] for line in lines],
            ys=[line.y[::every] for line in lines],
            keys=[line.label for line in lines],
            title=title,
            xname=panel.x_label,
        )
    return charts
