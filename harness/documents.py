"""Documents of a corpus, read one by one from files or a data set, and their tokens."""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError, DataConfig, one_line

BYTE_VOCABULARY = 256
DOCUMENT_END = 0  # byte that ends a document; text has no NUL
FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow", "xml", "webdataset")  # names of readers, not of data sets
PART = 2**18  # characters tokenised at once, on all cores

Document = str | bytes | tuple[str, str]  # a text, or a prompt and the response to it


def find_source(data: DataConfig) -> tuple[Iterator[Document], Any]:
    """The documents of a corpus, read when asked for, and what identifies them."""
    if data.kind == "hub":
        dataset, identity = open_dataset(data, "split")
        return read_rows(dataset, data), identity
    files = stdlib_files() if data.kind == "stdlib" else text_files("data.path", data.path or [])
    identity = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
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


def text_files(key: str, patterns: list[str]) -> list[Path]:
    """Files named by paths, folders (everything below) and globs, sorted within each, each once.

    Raises:
        ConfigError: names the config's ``key`` when a pattern matches nothing.
    """
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
            raise ConfigError(f"{key}={pattern}: no such file, or a folder or pattern without files")
        found.update(dict.fromkeys(p.resolve() for p in matches))
    return list(found)


def open_dataset(data: DataConfig, key: str) -> tuple[Any, list[Any]]:
    """The columns that are read of a split of a Hugging Face data set, and what identifies them.

    Args:
        key: the key of ``data`` that names the split, ``split`` or ``eval_split``.

    Returns:
        A ``datasets.Dataset``, or with ``data.streaming`` a ``datasets.IterableDataset``.

    Raises:
        ConfigError: what is asked for is not there, is empty or holds no text.
    """
    import datasets

    datasets.disable_progress_bars()
    asked = f"data.{key}={getattr(data, key)}"
    dataset, identity = load_saved(data, key) if data.path is not None else load_named(data, key)
    try:
        first = next(iter(dataset), None)
    except Exception as error:
        raise ConfigError(f"{asked}: cannot be read ({one_line(error)})") from error
    if first is None:
        raise ConfigError(f"{asked}: is empty; choose another split, or a data set that holds rows")
    texts = [column for column, value in first.items() if isinstance(value, str)]
    columns = {"data.prompt_column": data.prompt_column, "data.column": data.column}
    for name, column in columns.items():
        if column is not None and column not in first:
            raise ConfigError(f"{name}={column}: choose one of {', '.join(first)}")
        if column is not None and column not in texts:
            raise ConfigError(f"{name}={column}: does not hold text; choose one of {', '.join(texts) or 'none there'}")
    read = [column for column in columns.values() if column is not None]
    return dataset.select_columns(read), [data.name, data.config, getattr(data, key), read, *identity]


def load_saved(data: DataConfig, key: str) -> tuple[Any, list[Any]]:
    """A split of a ``save_to_disk`` folder, and the fingerprint of its content."""
    import datasets

    (path,) = data.path if len(data.path) == 1 else (None,)
    if path is None or not Path(path).is_dir():
        raise ConfigError(f"data.path={data.path}: no such folder (data=hub takes one save_to_disk folder)")
    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise ConfigError(
            f"data.path={path}: not a save_to_disk folder, or one with an empty split ({one_line(error)})"
        ) from error
    split = getattr(data, key)
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise ConfigError(f"data.{key}={split}: choose one of {', '.join(dataset)}")
        dataset = dataset[split]
    elif key == "eval_split":
        raise ConfigError(f"data.eval_split={split}: data.path={path} has no splits; drop it to hold sequences out")
    identity = [dataset._fingerprint]
    return dataset.to_iterable_dataset() if data.streaming else dataset, identity


def load_named(data: DataConfig, key: str) -> tuple[Any, list[Any]]:
    """A split of ``data.name``, and what identifies its revision or its files."""
    import datasets

    split = getattr(data, key)
    if data.name in FILE_FORMATS and not data.files:
        raise ConfigError(f"data.name={data.name}: a format of files; say which by data.files='*.{data.name}'")
    files = data.files and [
        name
        for pattern in data.files
        for name in ([pattern] if "://" in pattern else text_files("data.files", [pattern]))
    ]
    files = files and [str(name) for name in files]
    try:
        if not data.streaming:
            dataset = datasets.load_dataset(data.name, data.config, split=split, data_files=files)
            return dataset, [dataset._fingerprint]
        builder = datasets.load_dataset_builder(data.name, data.config, data_files=files)
        return builder.as_streaming_dataset(split=split), [builder.config_id, builder.hash]
    except Exception as error:
        raise ConfigError(f"data.name={data.name} data.{key}={split}: cannot be loaded ({one_line(error)})") from error


def read_rows(rows: Iterable[dict[str, Any]], data: DataConfig) -> Iterator[Document]:
    """The documents of a data set's rows.

    Raises:
        ConfigError: at a row that does not hold text.
    """
    for number, row in enumerate(rows):
        for key in ("column", "prompt_column"):
            column = getattr(data, key)
            if column is not None and not isinstance(row[column], str):
                where = "a row" if data.streaming else f"row {number}"
                raise ConfigError(f"data.{key}={column}: {where} holds {type(row[column]).__name__}, not text")
        yield row[data.column] if data.prompt_column is None else (row[data.prompt_column], row[data.column])


def in_parts(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of at least :data:`PART` characters each, but for the last."""
    part: list[Document] = []
    size = 0
    for document in documents:
        part.append(document)
        size += sum(map(len, document)) if isinstance(document, tuple) else len(document)
        if size >= PART:
            yield part
            part, size = [], 0
    if part:
        yield part


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


def open_tokenizer(data: DataConfig) -> Callable[[list[Document]], list[np.ndarray]]:
    """A function from documents to the tokens of each, its end included, in the smallest dtype that holds them.

    Token ``t`` of a prompt is kept as ``-1 - t``, in a signed dtype: it is read and never predicted.
    """
    if data.tokenizer == "bytes":
        size, end = BYTE_VOCABULARY, [DOCUMENT_END]
    else:
        assert data.tokenizer is not None
        tokenizer = load_tokenizer(data.tokenizer)
        size, end = len(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = np.min_scalar_type(size - 1 if data.prompt_column is None else -size)

    def split(texts: list[str | bytes]) -> list[Any]:
        if data.tokenizer == "bytes":
            raw = [text.encode("utf-8", "replace") if isinstance(text, str) else text for text in texts]
            return [np.frombuffer(text, dtype=np.uint8) for text in raw]
        decoded = [text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text for text in texts]
        return tokenizer(decoded, add_special_tokens=False)["input_ids"]

    def encode(documents: list[Document]) -> list[np.ndarray]:
        pairs = [document if isinstance(document, tuple) else ("", document) for document in documents]
        texts = split([text for _, text in pairs])
        if data.prompt_column is None:
            return [np.concatenate([tokens, end]).astype(dtype) for tokens in texts]
        prompts = split([prompt for prompt, _ in pairs])
        read = [-1 - np.array(prompt, dtype=np.int64) for prompt in prompts]
        return [np.concatenate([*both, end]).astype(dtype) for both in zip(read, texts, strict=True)]

    return encode
