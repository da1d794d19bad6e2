"""Data: sample *i* is a pure function of (seed, corpus), whatever the world, the batch split or the engine.

A corpus is a list of token sequences of at most ``data.seq_len`` tokens. It is tokenised once per machine, cached
on disk and memory-mapped, or read as a stream. :class:`Data` says which sequences update *t* takes and hands a rank
its share.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from filelock import FileLock

from harness.config import Config, ConfigError, DataConfig
from harness.documents import (
    Document,
    find_source,
    in_parts,
    open_dataset,
    open_tokenizer,
    tokenizer_files,
    tokenizer_size,
)
from harness.environment import cache_folder
from harness.stream import StreamedCorpus, count_targets, first_sequences

if TYPE_CHECKING:
    import torch

IGNORED = -100  # label of a position that is no target, as in torch and transformers
HELD_OUT = 2**40  # index of the first held-out sequence where those to train on may never end


class Sequences(Protocol):
    """Token sequences by index. The tokens of a prompt are kept as -1 - token: they are read and never predicted."""

    @property
    def train_size(self) -> int | None:
        """Sequences to train on; None where they never end."""

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Predicted tokens of each sequence: all but its first and a prompt's."""

    def tokens(self, index: int) -> np.ndarray:
        """The tokens of one sequence."""


class Corpus(Sequences, Protocol):
    """Sequences to train on and others that are held out."""

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""

    def eval_indices(self) -> np.ndarray:
        """Indices of the held-out sequences."""


@dataclass
class StoredCorpus:
    """Sequences that are slices of one memory-mapped token array; the last ``eval_size`` are held out."""

    array: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    counts: np.ndarray  # predicted tokens
    eval_size: int
    fingerprint: str

    @property
    def train_size(self) -> int:
        return len(self.starts) - self.eval_size

    def targets(self, indices: np.ndarray) -> np.ndarray:
        return self.counts[indices]

    def tokens(self, index: int) -> np.ndarray:
        return self.array[self.starts[index] : self.ends[index]]

    def eval_indices(self) -> np.ndarray:
        return np.arange(self.train_size, self.train_size + self.eval_size)


@dataclass
class SplitCorpus:
    """Sequences to train on, and others, apart from them and in memory, to evaluate on."""

    training: Sequences
    held_out: list[np.ndarray]
    fingerprint: str

    @property
    def train_size(self) -> int | None:
        return self.training.train_size

    def targets(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) == 0 or indices[0] >= HELD_OUT:
            return np.array([count_targets(self.tokens(int(index))) for index in indices])
        return self.training.targets(indices)

    def tokens(self, index: int) -> np.ndarray:
        return self.held_out[index - HELD_OUT] if index >= HELD_OUT else self.training.tokens(index)

    def eval_indices(self) -> np.ndarray:
        return np.arange(HELD_OUT, HELD_OUT + len(self.held_out))


@dataclass
class SyntheticCorpus:
    """Endless uniformly random tokens; each sequence has a random stream of its own."""

    seed: int
    vocab_size: int
    seq_len: int
    ragged: bool
    eval_size: int

    def __post_init__(self) -> None:
        self.fingerprint = f"synthetic-{self.seed}-{self.vocab_size}-{self.seq_len}-{self.ragged}"

    @property
    def train_size(self) -> None:
        return None

    def targets(self, indices: np.ndarray) -> np.ndarray:
        if not self.ragged:
            return np.full(len(indices), self.seq_len - 1)
        return np.array([self._generator(index).integers(2, self.seq_len + 1) - 1 for index in indices])

    def tokens(self, index: int) -> np.ndarray:
        generator = self._generator(index)
        length = generator.integers(2, self.seq_len + 1) if self.ragged else self.seq_len
        return generator.integers(0, self.vocab_size, length)

    def eval_indices(self) -> np.ndarray:
        return np.arange(HELD_OUT, HELD_OUT + self.eval_size)

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, int(index)]))


class Data:
    """The sequences of each update and of the evaluation, and a rank's share of them."""

    def __init__(self, corpus: Corpus, seed: int, seq_len: int):
        self.corpus = corpus
        self.seed = seed
        self.seq_len = seq_len
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.corpus.train_size or 0)

    def indices(self, first: int, count: int) -> np.ndarray:
        """Corpus indices of samples ``first`` … ``first + count - 1``; every epoch is a new permutation."""
        samples = np.arange(first, first + count)
        size = self.corpus.train_size
        if size is None:
            return samples
        epochs, places = samples // size, samples % size
        result = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            result[epochs == epoch] = self._order(int(epoch))[places[epochs == epoch]]
        return result

    def targets(self, indices: np.ndarray) -> int:
        """Predicted tokens in these sequences: all but each one's first and those of prompts."""
        return int(self.corpus.targets(indices).sum())

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` and ``labels``, each int64 of shape (sequences, seq_len), padded on the right.

        An index below 0 is an empty sequence without targets. Attention is causal, so padding on the right
        changes nothing before it; its labels are ignored, and a prompt's too.
        """
        import torch

        ids = np.zeros((len(indices), self.seq_len), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, index in enumerate(indices):
            if index >= 0:
                tokens = self.corpus.tokens(int(index)).astype(np.int64)
                ids[row, : len(tokens)] = np.where(tokens < 0, -1 - tokens, tokens)
                labels[row, : len(tokens)] = np.where(tokens < 0, IGNORED, tokens)
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def update_batches(
        self, step: int, global_size: int, micro_size: int, rank: int, world_size: int
    ) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Targets of the whole global batch of update ``step``, and this rank's micro batches of it."""
        indices = self.indices(step * global_size, global_size)
        share = np.array_split(indices, world_size)[rank]
        return self.targets(indices), (self.batch(share[i : i + micro_size]) for i in range(0, len(share), micro_size))

    def eval_batches(
        self, micro_size: int, rank: int, world_size: int
    ) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Targets of the held-out slice and this rank's micro batches: equally many on every rank."""
        indices = self.corpus.eval_indices()
        rounds = -(-len(indices) // (micro_size * world_size))
        padded = np.full(rounds * micro_size * world_size, -1, dtype=np.int64)
        padded[: len(indices)] = indices
        share = np.array_split(padded, world_size)[rank]
        return self.targets(indices), (self.batch(share[i : i + micro_size]) for i in range(0, len(share), micro_size))


def open_data(config: Config, vocab_size: int) -> Data:
    """The data of a resolved run; tokenises and caches the corpus if this machine has not done so yet.

    Raises:
        ConfigError: missing files, splits or columns, too little data, a tokenizer larger than the vocabulary.
    """
    data = config.data
    if data.kind == "synthetic":
        corpus: Corpus = SyntheticCorpus(config.seed, vocab_size, data.seq_len, data.ragged, data.eval_samples)
        return Data(corpus, config.seed, data.seq_len)
    known = tokenizer_size(data)
    if known > vocab_size:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer}: has {known} tokens, the model's vocabulary only {vocab_size}; "
            f"choose a tokenizer that fits or raise the vocabulary with model.config"
        )
    corpus = open_stream(data) if data.streaming else open_stored(data, config.batch.global_size or 1)
    return Data(corpus, config.seed, data.seq_len)


def open_stored(data: DataConfig, needed: int) -> Corpus:
    """The sequences of a corpus on disk, at least ``needed`` of them to train on."""
    held_out = [] if data.eval_split is None else open_eval_split(data)
    array, bounds, fingerprint = open_tokens(data)
    starts, ends = cut(bounds, data.seq_len, data.pack)
    counts = ends - starts - 1
    if data.prompt_column is not None:
        counts = np.array([count_targets(array[s:e]) for s, e in zip(starts, ends, strict=True)], dtype=np.int64)
        starts, ends, counts = starts[counts > 0], ends[counts > 0], counts[counts > 0]
    kept = data.eval_samples if data.eval_split is None else 0
    stored = StoredCorpus(array, starts, ends, counts, kept, fingerprint)
    if stored.train_size < needed:
        raise ConfigError(
            f"data={data.kind}: {len(starts)} sequences of {data.seq_len} tokens less data.eval_samples={kept} "
            f"is shorter than one batch of {needed} (batch.global_size); "
            f"give more data, or lower one of them or data.seq_len"
        )
    if data.eval_split is None:
        return stored
    return SplitCorpus(stored, held_out, hash_sequences(fingerprint, held_out))


def open_stream(data: DataConfig) -> Corpus:
    """The sequences of a stream; its first ones are held out, unless those of another split are."""
    rows, identity = open_dataset(data, "split")
    if data.eval_split is None:
        held_out, left_out = first_sequences(rows, data, "split"), data.eval_samples
    else:
        held_out, left_out = open_eval_split(data), 0
    cutting = [data.seq_len, data.pack, left_out]
    folder = cache_dir(data) / hash_key([identity, cutting, data.tokenizer, tokenizer_files(data)])
    training = StreamedCorpus(rows, data, left_out, folder)
    # A fingerprint is that of the content, wherever it lies: of a stream, its beginning.
    fingerprint = hash_sequences(json.dumps(cutting), [*held_out, training.tokens(0)])
    return SplitCorpus(training, held_out, fingerprint)


def open_eval_split(data: DataConfig) -> list[np.ndarray]:
    """The first ``data.eval_samples`` sequences of ``data.eval_split``."""
    rows, _ = open_dataset(data, "eval_split")
    return first_sequences(rows, data, "eval_split")


def hash_sequences(start: str, sequences: list[np.ndarray]) -> str:
    digest = hashlib.sha256(start.encode())
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little") + sequence.tobytes())
    return digest.hexdigest()[:16]


def hash_key(identity: Any) -> str:
    """Name of a folder of the cache."""
    return hashlib.sha256(json.dumps([1, identity]).encode()).hexdigest()[:24]


def cut(bounds: np.ndarray, seq_len: int, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the sequences of a token array whose documents end at ``bounds``."""
    if pack:
        starts = np.arange(0, int(bounds[-1]) - seq_len + 1, seq_len) if len(bounds) else np.zeros(0, dtype=np.int64)
        return starts, starts + seq_len
    document_starts = np.concatenate([[0], bounds])[: len(bounds)].astype(np.int64)
    cuts = [np.arange(s, e, seq_len) for s, e in zip(document_starts, bounds, strict=True)]
    starts = np.concatenate([np.zeros(0, dtype=np.int64), *cuts])
    ends = np.minimum(starts + seq_len, bounds[np.searchsorted(bounds, starts, side="right")])
    has_target = ends - starts >= 2
    return starts[has_target], ends[has_target]


def open_tokens(data: DataConfig) -> tuple[np.ndarray, np.ndarray, str]:
    """Token array, ends of the documents in it, and a hash of both, from the cache or made now."""
    source, identity = find_source(data)
    folder = cache_dir(data) / hash_key([identity, data.tokenizer, tokenizer_files(data)])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build_tokens(source, data, folder)
    array = np.load(folder / "tokens.npy", mmap_mode="r")
    return array, np.load(folder / "bounds.npy"), (folder / "fingerprint").read_text()


def cache_dir(data: DataConfig) -> Path:
    return Path(data.cache_dir).expanduser() if data.cache_dir else cache_folder()


def build_tokens(source: Iterator[Document], data: DataConfig, folder: Path) -> None:
    """Tokenise documents into ``folder``, which appears whole."""
    encode = open_tokenizer(data)
    digest = hashlib.sha256()
    bounds, total = [], 0
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with open(work / "raw", "wb") as raw:
            for part in in_parts(source):
                for tokens in encode(part):
                    raw.write(tokens.tobytes())
                    digest.update(tokens.tobytes())
                    total += len(tokens)
                    bounds.append(total)
        dtype = tokens.dtype if total else np.dtype(np.uint8)
        np.save(work / "tokens.npy", np.fromfile(work / "raw", dtype=dtype))
        np.save(work / "bounds.npy", np.asarray(bounds, dtype=np.int64))
        digest.update(np.asarray(bounds, dtype=np.int64).tobytes())
        (work / "fingerprint").write_text(digest.hexdigest()[:16])
        (work / "raw").unlink()
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
