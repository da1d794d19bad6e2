"""Keeps what libraries print off the user's screen: it goes to the run's log."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO, cast


class Shown:
    """A stream to a person, who may leave as ``head`` does: what is written from then on goes nowhere."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            return self._lose(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._lose("")

    def _lose(self, text: str) -> int:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Screen:
    """Takes over file descriptors 1 and 2; ``out`` and ``err`` still reach the user.

    Until the log's place is known the output waits in a temporary file.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.out = cast(TextIO, Shown(os.fdopen(os.dup(1), "w", buffering=1)))
        self.err = cast(TextIO, Shown(os.fdopen(os.dup(2), "w", buffering=1)))
        self._waiting = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._redirect(self._waiting.fileno())

    def log_to(self, path: Path) -> None:
        """From now on everything goes to ``path``, with what has been waiting before it."""
        sys.stdout.flush()
        sys.stderr.flush()
        with open(path, "ab") as log:
            self._waiting.seek(0)
            shutil.copyfileobj(self._waiting, log)
            log.flush()
            self._redirect(log.fileno())
        self._waiting.close()

    @staticmethod
    def _redirect(descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)


class Unseen:
    """In place of a :class:`Screen` where the parent shows what is to be seen, and the output is in a log already."""

    def __init__(self) -> None:
        self.out = self.err = open(os.devnull, "w")  # noqa: SIM115

    def log_to(self, path: Path) -> None:
        pass
