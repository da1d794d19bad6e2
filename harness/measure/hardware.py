"""What a run ran on: versions, hardware, commit. Recorded so that its numbers can be judged and reproduced."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("deepspeed", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "wandb", "numpy")


def describe_environment(corpus_fingerprint: str) -> dict[str, Any]:
    """The record in ``env.json``."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "hardware": {
            "host": socket.gethostname(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "threads_per_rank": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "cuda": torch.version.cuda,
        },
        "git_commit": git_commit(),
        "corpus_fingerprint": corpus_fingerprint,
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git_commit() -> str | None:
    """The commit of the checkout this runs from, with ``+`` when files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes.strip() else "")
