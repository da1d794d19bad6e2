"""A corpus read as a stream, never whole: the same sequences in the same order for every rank, from any index on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError, DataConfig
from harness.documents import in_parts, open_tokenizer, read_rows

NOTHING: np.ndarray = np.zeros(0, dtype=np.uint8)
START = {"index": 0, "place": 0, "rest": [], "state": None}  # the bookmark of the beginning


def count_targets(tokens: np.ndarray) -> int:
    """Predicted tokens of a sequence: all but its first and those of a prompt, which are below 0."""
    return int(np.count_nonzero(tokens[1:] >= 0))


def cut_document(rest: np.ndarray, tokens: np.ndarray, seq_len: int, pack: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """The sequences that a document completes, and what is left of it for the next when documents are joined.

    Args:
        rest: tokens left by the document before, fewer than ``seq_len``.
    """
    if pack:
        tokens = np.concatenate([rest.astype(tokens.dtype), tokens])
    end = len(tokens) // seq_len * seq_len if pack else len(tokens)
    sequences = [tokens[i : i + seq_len] for i in range(0, end, seq_len)]
    return [sequence for sequence in sequences if count_targets(sequence)], tokens[end:]


def first_sequences(rows: Any, data: DataConfig, key: str) -> list[np.ndarray]:
    """The first ``data.eval_samples`` sequences of the rows of the split that ``data.KEY`` names.

    Raises:
        ConfigError: the split has fewer.
    """
    encode = open_tokenizer(data)

    def cut() -> Iterator[np.ndarray]:
        rest = NOTHING
        for part in in_parts(read_rows(rows, data)):
            for tokens in encode(part):
                sequences, rest = cut_document(rest, tokens, data.seq_len, data.pack)
                yield from sequences

    found = list(islice(cut(), data.eval_samples))
    if len(found) < data.eval_samples:
        raise ConfigError(
            f"data.eval_samples={data.eval_samples}: data.{key}={getattr(data, key)} has {len(found)} sequences of "
            f"{data.seq_len} tokens; lower it or data.seq_len"
        )
    return found


class StreamedCorpus:
    """The sequences of a stream of documents in its own order, epoch after epoch, without the first ``left_out``.

    Sequences asked for in order are read ahead as far as a global batch and forgotten behind it. Any other are read
    anew from the last bookmark before them: every :attr:`SPACING` sequences the library's state of the stream and the
    tokens that wait to be packed are kept in ``folder``, for every run on the same stream.
    """

    SPACING = 4096
    train_size = None

    def __init__(self, rows: Any, data: DataConfig, left_out: int, folder: Path):
        self.rows = rows
        self.data = data
        self.left_out = left_out
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._encode = open_tokenizer(data)
        self._start_at(START)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Predicted tokens of each sequence, all of them then at hand."""
        self._hold(int(min(indices)), int(max(indices)) + 1)
        return np.array([count_targets(self._held[int(index)]) for index in indices])

    def tokens(self, index: int) -> np.ndarray:
        """The tokens of one sequence."""
        if index not in self._held:
            self._hold(index, index + 1)
        return self._held[index]

    def _hold(self, first: int, last: int) -> None:
        """Have sequences ``first`` … ``last - 1`` at hand, and forget those before."""
        if first < min(self._held, default=self._next) or first > self._next:
            mark = self._bookmark_before(first)
            if first < self._next or mark["index"] > self._next:
                self._start_at(mark)
        for index in [index for index in self._held if index < first]:
            del self._held[index]
        while self._next < last:
            sequence = next(self._sequences)
            if self._next >= first:
                self._held[self._next] = sequence
            self._next += 1

    def _start_at(self, mark: dict[str, Any]) -> None:
        self._held: dict[int, np.ndarray] = {}
        self._next = int(mark["index"])  # of the sequence that is read next
        self._sequences = self._read(**mark)

    def _read(self, index: int, place: int, rest: list[int], state: Any) -> Iterator[np.ndarray]:
        """Sequences from a bookmark on, without end.

        Args:
            index: of the first one.
            place: its place in the epoch, with those left out.
            rest: tokens before it that wait to be packed.
            state: of the data set.
        """
        waiting, marked = np.array(rest, dtype=np.int64), index // self.SPACING
        while True:
            self.rows.load_state_dict(state)
            for part in in_parts(read_rows(self.rows, self.data)):
                for tokens in self._encode(part):
                    sequences, waiting = cut_document(waiting, tokens, self.data.seq_len, self.data.pack)
                    for sequence in sequences:
                        if place >= self.left_out:
                            yield sequence
                            index += 1
                        place += 1
                if index // self.SPACING > marked:
                    marked = index // self.SPACING
                    mark = {"index": index, "place": place, "rest": waiting.tolist(), "state": self.rows.state_dict()}
                    self._keep(mark)
            if place <= self.left_out:
                raise ConfigError(
                    f"data.split={self.data.split}: {place} sequences of {self.data.seq_len} tokens less {self.left_out} "
                    f"for evaluation leave none to train on; lower data.eval_samples or data.seq_len"
                )
            place, waiting, state = 0, NOTHING, None

    def _keep(self, mark: dict[str, Any]) -> None:
        path = self.folder / f"{mark['index']}.json"
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                json.dump(mark, file)
            os.replace(file.name, path)

    def _bookmark_before(self, index: int) -> dict[str, Any]:
        places = [int(path.stem) for path in self.folder.glob("*.json") if int(path.stem) <= index]
        return json.loads((self.folder / f"{max(places)}.json").read_text()) if places else START
