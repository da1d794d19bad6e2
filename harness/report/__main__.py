"""Command line of the report: ``python -m harness.report runs/STUDY [runs/OTHER …]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report",
        description="Tables and scaling curves of one or more studies: table.csv, table.md, index.html, PNG and SVG.",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="folder of a study, or one run directory")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="read the runs from W&B instead of from disk")
    parser.add_argument("--group", metavar="STUDY", help="the study to read from W&B")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: report/ in the (first) study's folder")
    parser.add_argument(
        "--upload",
        choices=("auto", "offline", "online", "disabled"),
        default="disabled",
        help="also log the report as a run of its own to W&B; auto: online only with an API key (default: disabled)",
    )
    options = parser.parse_args(arguments)
    if options.wandb and options.runs:
        parser.error("RUNS and --wandb exclude each other")
    if options.wandb and not options.group:
        parser.error("--wandb needs --group STUDY")
    if options.group and not options.wandb:
        parser.error("--group needs --wandb ENTITY/PROJECT")
    if not options.wandb and not options.runs:
        parser.error("name at least one folder, e.g. runs/STUDY, or --wandb ENTITY/PROJECT --group STUDY")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from harness.config import ConfigError
    from harness.report.study import report_from_disk, report_from_wandb

    try:
        if options.wandb:
            report = report_from_wandb(options.wandb, options.group, options.out, options.upload)
        else:
            report = report_from_disk(options.runs, options.out, options.upload)
    except ConfigError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(report / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
