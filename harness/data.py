"""Data: sample *i* is a pure function of (seed, corpus), whatever the world, the batch split or the engine.

A corpus is a list of token sequences of at most ``data.seq_len`` tokens. It is tokenised once per machine, cached
on disk and memory-mapped. :class:`Data` says which sequences update *t* takes and hands a rank its share.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from filelock import FileLock

from harness.config import Config, ConfigError, DataConfig
from harness.environment import cache_folder

if TYPE_CHECKING:
    import torch

IGNORED = -100  # label of a position that is no target, as in torch and transformers
BYTE_VOCABULARY = 256
DOCUMENT_END = 0  # byte that ends a document; text has no NUL


class Corpus(Protocol):
    """Token sequences by index; the last ``eval_size`` are held out."""

    eval_size: int
    fingerprint: str

    @property
    def train_size(self) -> int | None:
        """Sequences to train on; None where they never end."""

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of each sequence."""

    def tokens(self, index: int) -> np.ndarray:
        """The tokens of one sequence."""

    def eval_indices(self) -> np.ndarray:
        """Indices of the held-out sequences."""


@dataclass
class StoredCorpus:
    """Sequences that are slices of one memory-mapped token array."""

    array: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    eval_size: int
    fingerprint: str

    @property
    def train_size(self) -> int:
        return len(self.starts) - self.eval_size

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.ends[indices] - self.starts[indices]

    def tokens(self, index: int) -> np.ndarray:
        return self.array[self.starts[index] : self.ends[index]]

    def eval_indices(self) -> np.ndarray:
        return np.arange(self.train_size, self.train_size + self.eval_size)


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

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        if not self.ragged:
            return np.full(len(indices), self.seq_len)
        return np.array([self._generator(index).integers(2, self.seq_len + 1) for index in indices])

    def tokens(self, index: int) -> np.ndarray:
        generator = self._generator(index)
        length = generator.integers(2, self.seq_len + 1) if self.ragged else self.seq_len
        return generator.integers(0, self.vocab_size, length)

    def eval_indices(self) -> np.ndarray:
        return np.arange(2**40, 2**40 + self.eval_size)

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
        """Predicted tokens in these sequences: all but each one's first."""
        return int(np.maximum(self.corpus.lengths(indices) - 1, 0).sum())

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` and ``labels``, each int64 of shape (sequences, seq_len), padded on the right.

        An index below 0 is an empty sequence without targets. Attention is causal, so padding on the right
        changes nothing before it; its labels are ignored.
        """
        import torch

        ids = np.zeros((len(indices), self.seq_len), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, index in enumerate(indices):
            if index >= 0:
                tokens = self.corpus.tokens(int(index))
                ids[row, : len(tokens)] = tokens
                labels[row, : len(tokens)] = tokens
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
    array, bounds, fingerprint = open_tokens(data)
    starts, ends = cut(bounds, data.seq_len, data.pack)
    stored = StoredCorpus(array, starts, ends, data.eval_samples, fingerprint)
    needed = config.batch.global_size or 1
    if stored.train_size < needed:
        raise ConfigError(
            f"data={data.kind}: {len(starts)} sequences of {data.seq_len} tokens less data.eval_samples="
            f"{data.eval_samples} is shorter than one batch of {needed} (batch.global_size); "
            f"give more data, or lower one of them or data.seq_len"
        )
    return Data(stored, config.seed, data.seq_len)


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
    key = hashlib.sha256(json.dumps([1, identity, data.tokenizer, *tokenizer_files(data)]).encode()).hexdigest()[:24]
    folder = cache_dir(data) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build_tokens(source, data, folder)
    array = np.load(folder / "tokens.npy", mmap_mode="r")
    return array, np.load(folder / "bounds.npy"), (folder / "fingerprint").read_text()


def cache_dir(data: DataConfig) -> Path:
    return Path(data.cache_dir).expanduser() if data.cache_dir else cache_folder()


def build_tokens(source: Iterator[str | bytes], data: DataConfig, folder: Path) -> None:
    """Tokenise documents into ``folder``, which appears whole."""
    encode, end, dtype = open_tokenizer(data)
    digest = hashlib.sha256()
    bounds, total = [], 0
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with open(work / "raw", "wb") as raw:
            for number, document in enumerate(source):
                if not isinstance(document, (str, bytes)):
                    raise ConfigError(
                        f"data.column={data.column}: row {number} holds {type(document).__name__}, not text"
                    )
                tokens: np.ndarray = np.append(encode(document), end).astype(dtype)
                raw.write(tokens.tobytes())
                digest.update(tokens.tobytes())
                total += len(tokens)
                bounds.append(total)
        flat: np.ndarray = np.fromfile(work / "raw", dtype=dtype) if total else np.zeros(0, dtype=dtype)
        np.save(work / "tokens.npy", flat)
        np.save(work / "bounds.npy", np.asarray(bounds, dtype=np.int64))
        digest.update(np.asarray(bounds, dtype=np.int64).tobytes())
        (work / "fingerprint").write_text(digest.hexdigest()[:16])
        (work / "raw").unlink()
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def find_source(data: DataConfig) -> tuple[Iterator[str | bytes], Any]:
    """The documents of a corpus, read when asked for, and what identifies them."""
    if data.kind == "hub":
        return open_dataset(data)
    files = stdlib_files() if data.kind == "stdlib" else text_files(data.path or [])
    identity: list[Any] = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    if data.kind == "stdlib":
        identity = [sys.version, *[[f.name, f.stat().st_size] for f in files]]
    return (f.read_bytes() for f in files), identity


def stdlib_files() -> list[Path]:
    """Sources of the running Python's standard library, without its tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda f: f.relative_to(root).as_posix())


def text_files(patterns: list[str]) -> list[Path]:
    """Files named by paths, folders (everything below) and globs, sorted within each, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file())
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not matches:
            raise ConfigError(f"data.path={pattern}: no such file, or a folder or pattern without files")
        found.update(dict.fromkeys(p.resolve() for p in matches))
    return list(found)


def open_dataset(data: DataConfig) -> tuple[Iterator[str | bytes], Any]:
    """A column of a Hugging Face data set, by hub name or ``save_to_disk`` folder."""
    import datasets

    datasets.disable_progress_bars()
    if data.path is not None:
        (path,) = data.path if len(data.path) == 1 else (None,)
        if path is None or not Path(path).is_dir():
            raise ConfigError(f"data.path={data.path}: no such folder (data=hub takes one save_to_disk folder)")
        try:
            dataset = datasets.load_from_disk(path)
        except Exception as error:
            raise ConfigError(f"data.path={path}: not a save_to_disk folder ({one_line(error)})") from error
        if isinstance(dataset, datasets.DatasetDict):
            if data.split not in dataset:
                raise ConfigError(f"data.split={data.split}: choose one of {', '.join(dataset)}")
            dataset = dataset[data.split]
    else:
        try:
            dataset = datasets.load_dataset(data.name, data.config, split=data.split)
        except Exception as error:
            raise ConfigError(f"data.name={data.name}: cannot be loaded ({one_line(error)})") from error
    if data.column not in dataset.column_names:
        raise ConfigError(f"data.column={data.column}: choose one of {', '.join(dataset.column_names)}")
    if not all(isinstance(value, str) for value in dataset[:1][data.column]):
        raise ConfigError(f"data.column={data.column}: does not hold text")
    identity = [data.name, data.config, data.split, data.column, dataset._fingerprint]
    return (row[data.column] for row in dataset.select_columns(data.column)), identity


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def tokenizer_files(data: DataConfig) -> list[Any]:
    """What identifies the content of a tokenizer in a local folder."""
    folder = Path(data.tokenizer or "").expanduser()
    if data.tokenizer == "bytes" or not folder.is_dir():
        return []
    return sorted([f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in folder.iterdir() if f.is_file())


@lru_cache(maxsize=1)
def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name)
    except Exception as error:
        raise ConfigError(f"data.tokenizer={name}: cannot be loaded ({one_line(error)})") from error


def tokenizer_size(data: DataConfig) -> int:
    """Tokens that a tokenizer can produce."""
    if data.tokenizer is None:
        raise ConfigError("data.tokenizer=null: text needs `bytes`, or a tokenizer's name or folder")
    return BYTE_VOCABULARY if data.tokenizer == "bytes" else len(load_tokenizer(data.tokenizer))


def open_tokenizer(data: DataConfig) -> tuple[Any, list[int], type]:
    """A function from a document to token ids, the ids that end a document, and the dtype that holds them."""
    if data.tokenizer == "bytes":
        return (
            lambda d: np.frombuffer(d.encode("utf-8", "replace") if isinstance(d, str) else d, dtype=np.uint8),
            [DOCUMENT_END],
            np.uint8,
        )
    assert data.tokenizer is not None
    tokenizer = load_tokenizer(data.tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32

    def encode(document: str | bytes) -> list[int]:
        text = document.decode("utf-8", errors="replace") if isinstance(document, bytes) else document
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return encode, end, dtype
