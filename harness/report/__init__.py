"""The report of a study: its runs as tables and as scaling curves, on disk and in W&B.

``runs`` reads runs from disk, ``wandb_api`` from W&B; ``series`` finds what varies; ``scaling`` is the arithmetic;
``curves`` is the data of every picture, ``pictures`` draws it; ``table`` and ``page`` write, ``upload`` sends.
"""

from __future__ import annotations

from pathlib import Path


def write_report(study_dirs: list[Path], out: Path | None = None, upload: str = "disabled") -> Path:
    """Read runs from disk and write their report; returns its folder.

    Args:
        study_dirs: folders of studies, or single run directories.
        out: where to write; by default ``report/`` in the first study's folder.
        upload: W&B mode for the report's own run: ``auto``, ``offline``, ``online`` or ``disabled``.

    Raises:
        ConfigError: in one line, when there is no run to report on or the folder cannot be written.
    """
    from harness.report.study import report_from_disk

    return report_from_disk(study_dirs, out, upload)
