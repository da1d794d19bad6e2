"""The data of the status matrix: how every point of a study ended, none left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.curves import RANKS_LABEL, Matrix
from harness.report.record import Run
from harness.report.series import Comparison


def status_matrix(comparison: Comparison) -> Matrix:
    """Every point with how its runs ended; columns are world sizes, or batch sizes if the world is the same."""
    slug, title = "status", "How every point ended"
    worlds = {run.world_size for run in comparison.runs}
    batches = {run.global_batch_size for run in comparison.runs}
    column: Callable[[Run], Any]
    if len(worlds) == 1 and len(batches) > 1:
        series, column, x_label = comparison.by_batch(), lambda run: run.global_batch_size, "global batch (sequences)"
    else:
        series, column, x_label = comparison.by_ranks(), lambda run: run.world_size, RANKS_LABEL
    columns = sorted({column(run) for run in comparison.runs}, key=lambda value: (value is None, value or 0))
    cells: list[list[dict[str, int]]] = []
    for each in series:
        row: list[dict[str, int]] = [{} for _ in columns]
        for run in each.runs:
            cell = row[columns.index(column(run))]
            cell[run.status] = cell.get(run.status, 0) + 1
        cells.append(row)
    names = ["unknown" if value is None else str(value) for value in columns]
    return Matrix(slug, title, x_label, names, [each.label for each in series], cells)
