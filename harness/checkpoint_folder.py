"""Checkpoints on disk: which a run has, whether one is as it was written, and which a run goes on from.

A checkpoint is the folder ``samples-N``: a safetensors file per rank that owns something, ``checkpoint.json``, which says
what they belong to, and ``checksums.sfv`` with the CRC-32 of each of those files in the SFV format, which ``cksfv`` reads.
"""

from __future__ import annotations

import json
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.config import Config, ConfigError
from harness.rundir import RunDir, write_json, write_whole

FORMAT = 2
DESCRIPTION = "checkpoint.json"
CHECKSUMS = "checksums.sfv"
CHUNK = 2**20  # bytes read at once


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def checksum_of(file: Path) -> int:
    """The CRC-32 of a file, from 0 to 2**32 - 1; any error within 32 successive bits changes it."""
    checksum, chunk = 0, memoryview(bytearray(CHUNK))
    with open(file, "rb", buffering=0) as source:
        while count := source.readinto(chunk):
            checksum = zlib.crc32(chunk[:count], checksum)
    return checksum


def line_of(name: str, checksum: int) -> str:
    return f"{name} {checksum:08X}\n"


def seal(folder: Path, description: dict[str, Any], checksums: list[int]) -> None:
    """Write what a checkpoint's folder holds beside its rank files.

    Args:
        checksums: of the rank files, by rank.
    """
    write_json(folder / DESCRIPTION, {"format": FORMAT, "rank_files": len(checksums), **description})
    lines = [line_of(rank_file(rank), checksum) for rank, checksum in enumerate(checksums)]
    write_whole(folder / CHECKSUMS, "".join([line_of(DESCRIPTION, checksum_of(folder / DESCRIPTION)), *lines]))


def read_description(checkpoint: Path) -> dict[str, Any]:
    """checkpoint.json.

    Raises:
        ConfigError: when it is none, or of another format.
    """
    try:
        description = json.loads((checkpoint / DESCRIPTION).read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{DESCRIPTION}: cannot be read ({why})") from error
    form = description.get("format") if isinstance(description, dict) else None
    if form != FORMAT:
        raise ConfigError(f"{DESCRIPTION}: of format {form!s:.40}, this version reads {FORMAT}")
    return description


def damage_of(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, in one line that names the file; empty when every byte is as it was written.

    It reads the whole checkpoint, several files at a time: ask once per world.
    """
    try:
        description = read_description(checkpoint)
        stored = (checkpoint / CHECKSUMS).read_bytes().splitlines(keepends=True)
        check_file(checkpoint, DESCRIPTION, stored)  # before what it says is relied on
        names = map(rank_file, range(description["rank_files"]))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: check_file(checkpoint, name, stored), names))
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or CHECKSUMS).name}: {error.strerror or error}"
    return ""


def check_file(checkpoint: Path, name: str, stored: list[bytes]) -> None:
    """Look through a file, whose line must be among those that were stored.

    Raises:
        ConfigError: when it is not: the file has changed, or its line has.
    """
    if line_of(name, checksum_of(checkpoint / name)).encode() not in stored:
        raise ConfigError(f"{name} is not what {CHECKSUMS} says")


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, damaged or not, oldest first."""
    found = [path for path in folder.glob("samples-*") if path.name[8:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[8:]))


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint of a folder that is not damaged; those that are, are named on stderr."""
    for path in reversed(find_checkpoints(folder)):
        why = damage_of(path)
        if not why:
            return path
        print(f"{path}: damaged, passed over ({why})", file=sys.stderr)
    return None


def checkpoint_of(path: Path) -> Path:
    """A checkpoint itself, or the newest of a run that is not damaged.

    Raises:
        ConfigError: when it is damaged, or there is none.
    """
    if any((path / name).exists() for name in (DESCRIPTION, CHECKSUMS)):
        why = damage_of(path)
        if why:
            raise ConfigError(f"{path}: damaged ({why}); give another")
        return path
    found = newest_whole(path / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{path}: no checkpoint there; give a run with train.checkpoint_every, or a checkpoint folder"
        )
    return found


def resolve_resume(resume: str) -> str:
    """``train.resume`` with a run's or checkpoint's folder replaced by that of a checkpoint which is whole; ``auto``
    and ``never`` as they are.

    Raises:
        ConfigError: when the folder holds no checkpoint that is whole.
    """
    if resume in ("auto", "never"):
        return resume
    try:
        return str(checkpoint_of(Path(resume).expanduser().resolve()))
    except ConfigError as error:
        raise ConfigError(f"train.resume={error}") from error


def find_resume(config: Config, run: RunDir) -> Path | None:
    """The checkpoint that a run goes on from: under ``auto`` its own newest that is whole; one that was named has been
    looked through when the config was resolved."""
    if config.train.resume == "auto":
        return newest_whole(run.path / "checkpoints")
    return None if config.train.resume == "never" else Path(config.train.resume)
