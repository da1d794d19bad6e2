"""Whatever is put in: a config resolves or is refused in one line, no token is lost or counted twice, a damaged record is
skipped and named, and a damaged checkpoint is never loaded in part."""

import copy
import functools
import itertools
import json
import os
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import FloatNode, IntegerNode, OmegaConf, StringNode
from safetensors.torch import save_file

from harness.checkpoint import Reader, key_of
from harness.checkpoint_folder import CHECKSUMS, DESCRIPTION, checksum_of, find_resume, rank_file, resolve_resume, seal
from harness.compose import decide, run_hydra
from harness.config import ConfigError, DataConfig, dump, load, register_schemas
from harness.data import IGNORED, Data, StoredCorpus, build_tokens, cut
from harness.report.runs import read_runs
from harness.report.series import Comparison
from harness.report.study import build_pictures
from harness.report.table import run_rows
from harness.rundir import RunDir, config_hash, run_name
from tests.launched import ROOT
from tests.run_factory import make_run, resolved


def property_of(examples: int):
    """Settings of a property: how many inputs are tried, the same ones each time."""
    calm = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=int(os.environ.get("EXAMPLES", examples)), deadline=None, derandomize="EXAMPLES" not in os.environ,
        database=None, suppress_health_check=calm,
    )  # fmt: skip


# Configs

HOSTILE = (
    "", " ", "'", '"', "a\nb", "$(touch owned)", "`touch owned`", "; touch owned", "${seed}", "${", "}", "\0", "a\0b",
    "../x", "/dev/null/x", "~nobody/x", "ü…🙂", "\udcff", "-rf", "%s", "{0}", "null", "nan", "1e999", "0x10", "[1", "a,b",
    "\x1b[31m", "a" * 5000, "con", ".", "..", "[1,2]", "{a: 1}", "!!python/object:os.system", "a: b", "#", "\u2028",
)  # fmt: skip
# No text of chance may name a folder that exists, since a corpus is read from it.
TEXTS = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_characters="/.~*?["), max_size=12)
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 10**9, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e300]) | st.one_of(
    st.integers(-(2**70), 2**70), st.floats()
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.sampled_from(["a", "n_embd", "kind"]), LEAVES)
MORE_KEYS = (
    "model.config.n_layer", "model.config.vocab_size", "model.config.unknown", "deepspeed.zero_optimization.stage",
    "deepspeed.zero_optimization.reduce_scatter", "deepspeed.bf16", "deepspeed.steps_per_print", "deepspeed.unknown",
    "unknown", "train.unknown",
)  # fmt: skip
STARTS = (
    ("data=synthetic",),
    ("data=synthetic", "parallel=async"),
    ("data=synthetic", "engine=ddp"),
    ("data=text", "data.path=x"),
)


@functools.cache
def start(overrides):
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra_compose("config", list(overrides))


def keys_of(node, prefix=""):
    for key in node:
        child = node._get_node(key)
        if OmegaConf.is_dict(child) and child._content:
            yield from keys_of(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def values_for(node, key):
    """Mostly of the key's own type, so that Hydra lets them through, and sometimes anything."""
    own = {IntegerNode: NUMBERS.filter(lambda v: isinstance(v, int)), FloatNode: NUMBERS, StringNode: TEXTS}
    kind = (
        type(OmegaConf.select(node, key.rpartition(".")[0])._get_node(key.rpartition(".")[2])) if "." in key else None
    )
    return st.one_of(own.get(kind, VALUES), own.get(kind, VALUES), VALUES)


def changes_of(overrides):
    node = start(overrides)
    keys = [*keys_of(node)]
    one = st.sampled_from(keys).flatmap(lambda key: st.tuples(st.just(key), values_for(node, key)))
    more = st.tuples(st.sampled_from(MORE_KEYS), VALUES)
    return st.tuples(st.just(overrides), st.lists(one | one | more, min_size=1, max_size=2).map(dict))


CHANGES = st.sampled_from(STARTS).flatmap(changes_of)


def check_resolved(config, folder):
    """A config that was accepted can be written, read, named and begun."""
    assert asdict(load(dump(config))) == asdict(config) or "nan" in dump(config)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", run_name(config))
    assert re.fullmatch("[0-9a-f]{8}", config_hash(config))
    batch, world = config.batch, config.launch.world_size
    assert batch.per_rank_size * world == batch.global_size and batch.per_rank_size % batch.micro_size == 0
    config.runs_dir = str(folder / "runs")
    try:
        run = RunDir.create(config, "command")
    except ConfigError as error:
        assert_one_line(error)
        return
    assert run.path.resolve().parent.parent == (folder / "runs").resolve()
    shutil.rmtree(folder / "runs")


def assert_one_line(error):
    text = str(error)
    assert text.strip() and len(text.splitlines()) == 1, text


@property_of(250)
@given(CHANGES, st.sampled_from([1, 2, 3, 4096]))
def test_any_config_resolves_or_is_refused_in_one_line(tmp_path, monkeypatch, change, world_size):
    monkeypatch.chdir(tmp_path)
    overrides, values = change
    composed = copy.deepcopy(start(overrides))
    try:
        for key, value in values.items():
            OmegaConf.update(composed, key, value, force_add=True)
    except Exception:  # refused by Hydra, which the next property goes through
        return
    try:
        config = decide(composed, world_size, 0)
    except ConfigError as error:
        assert_one_line(error)
    else:
        check_resolved(config, tmp_path)
    assert not (tmp_path / "owned").exists()


@property_of(30)
@given(st.sampled_from([*keys_of(start(STARTS[0])), *MORE_KEYS]), LEAVES | st.lists(LEAVES, max_size=2), st.booleans())
def test_any_command_line_composes_or_is_refused_in_one_line(tmp_path, monkeypatch, key, value, quoted):
    monkeypatch.chdir(tmp_path)
    text = str(value)
    if quoted:
        text = "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"
    reached = []
    try:
        run_hydra([*STARTS[0], f"{key}={text}"], lambda composed: reached.append(decide(composed, 2, 0)))
    except ConfigError as error:
        assert_one_line(error)
    else:
        (config,) = reached
        check_resolved(config, tmp_path)
    assert not (tmp_path / "owned").exists()


# Data

DOCUMENTS = st.lists(st.integers(0, 3) | st.integers(0, 40) | st.sampled_from([200]), max_size=12)


def corpus_of(lengths, seq_len, pack, eval_size=0):
    """Documents of these lengths whose tokens are 1, 2, 3, …, so that each can be told from all others."""
    tokens, bounds = np.arange(1, sum(lengths) + 1), np.cumsum(np.asarray(lengths, dtype=np.int64))
    starts, ends = cut(bounds, seq_len, pack)
    return StoredCorpus(tokens, starts, ends, ends - starts - 1, eval_size, "corpus"), bounds


@property_of(200)
@given(DOCUMENTS, st.integers(2, 9), st.booleans())
def test_every_token_is_in_one_sequence_at_most_and_only_what_has_no_target_is_left_out(lengths, seq_len, pack):
    corpus, bounds = corpus_of(lengths, seq_len, pack)
    sequences = [corpus.tokens(i) for i in range(corpus.train_size)]
    used = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
    assert len(set(used.tolist())) == len(used)
    assert all(2 <= len(s) <= seq_len and np.array_equal(s, np.arange(s[0], s[0] + len(s))) for s in sequences)
    if pack:
        assert len(used) == sum(lengths) // seq_len * seq_len
    else:
        alone = sum(length % seq_len == 1 for length in lengths)
        assert len(used) == sum(lengths) - alone
        assert all(np.searchsorted(bounds, s[0]) == np.searchsorted(bounds, s[-1]) for s in sequences)


@property_of(150)
@given(
    DOCUMENTS,
    st.integers(2, 9),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_shares_add_up_to_the_global_batch_and_targets_to_the_labels(
    lengths, seq_len, pack, eval_size, world_size, micro_size, accumulation
):
    corpus, _ = corpus_of([*lengths, 90], seq_len, pack, eval_size)
    data, size = Data(corpus, 0, seq_len), world_size * micro_size * accumulation
    seen = []
    for step in range(-(-2 * corpus.train_size // size)):
        ids, labels, counted = [], [], set()
        for rank in range(world_size):
            targets, batches = data.update_batches(step, size, micro_size, rank, world_size)
            counted.add(targets)
            for micro_ids, micro_labels in batches:
                assert micro_ids.shape == micro_labels.shape == (micro_size, seq_len)
                ids.append(micro_ids)
                labels.append(micro_labels)
        ids, labels = torch.cat(ids), torch.cat(labels)
        assert counted == {int((labels[:, 1:] != IGNORED).sum())}
        assert torch.equal(torch.where(labels == IGNORED, 0, labels), ids)
        assert np.array_equal(ids.numpy(), data.batch(data.indices(step * size, size))[0].numpy())
        seen += ids.tolist()
    held_out = {int(corpus.tokens(int(i))[0]) for i in corpus.eval_indices()}
    for epoch in range(2):
        rows = seen[epoch * corpus.train_size : (epoch + 1) * corpus.train_size]
        tokens = [token for row in rows for token in row if token]
        assert len(set(tokens)) == len(tokens) == int((corpus.ends - corpus.starts)[: corpus.train_size].sum())
        assert not held_out & {row[0] for row in rows}
    targets = {data.eval_batches(micro_size, rank, world_size)[0] for rank in range(world_size)}
    labels = [b[1] for rank in range(world_size) for b in data.eval_batches(micro_size, rank, world_size)[1]]
    assert targets == {sum(int((each[:, 1:] != IGNORED).sum()) for each in labels)}


@property_of(100)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=20) | st.sampled_from(["", b"\0\0", "\ud800", "x" * 10_000])))
def test_any_documents_are_tokenised_byte_by_byte(tmp_path, documents):
    shutil.rmtree(tmp_path / "tokens", ignore_errors=True)
    build_tokens(iter(documents), DataConfig(kind="text", path="x"), tmp_path / "tokens")
    tokens, bounds = np.load(tmp_path / "tokens" / "tokens.npy"), np.load(tmp_path / "tokens" / "bounds.npy")
    encoded = [d if isinstance(d, bytes) else d.encode("utf-8", "replace") for d in documents]
    assert tokens.tobytes() == b"".join(each + b"\0" for each in encoded)
    assert bounds.tolist() == list(itertools.accumulate(len(each) + 1 for each in encoded))


# Damaged records

FILES = ("status.json", "summary.json", "metrics.jsonl", "config.yaml", "env.json")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
GARBAGE = st.binary(max_size=60) | st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"9" * 5000, b"&a [*a]"]
)
DAMAGES = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("garbage"), GARBAGE),
    st.tuples(st.just("inserted"), st.tuples(st.floats(0, 1), GARBAGE)),
    st.tuples(st.just("foreign"), JSON),
    st.tuples(st.just("value"), st.tuples(st.integers(0, 200), JSON)),
    st.tuples(st.just("folder"), st.none()),
)


def damaged(text: bytes, name: str, how: str, what) -> bytes:
    if how == "cut":
        return text[: int(what * (len(text) - 1))]
    if how == "garbage":
        return what
    if how == "flipped":
        place = int(what[0] * (len(text) - 1))
        return text[:place] + bytes([text[place] ^ what[1]]) + text[place + 1 :]
    if how == "inserted":
        place = int(what[0] * len(text))
        return text[:place] + what[1] + text[place:]
    if how == "foreign":
        return json.dumps(what).encode()
    number, value = what
    if name == "config.yaml":
        config = OmegaConf.to_container(OmegaConf.create(text.decode()))
        keys = list(keys_of(OmegaConf.create(config)))
        *groups, key = keys[number % len(keys)].split(".")
        node = functools.reduce(dict.__getitem__, groups, config)
        node[key] = value
        return json.dumps(config).encode()
    lines = text.decode().splitlines() if name == "metrics.jsonl" else [text.decode()]
    values = json.loads(lines[-1])
    values[list(values)[number % len(values)]] = value
    return "\n".join([*lines[:-1], json.dumps(values), ""]).encode()


class Study:
    """A completed run, whose files can be damaged, and beside it one that stays as it is."""

    def __init__(self, folder):
        for seed in (0, 1):
            self.config = resolved(folder, "batch.global_size=32", "train.steps=5", f"seed={seed}")
            self.run = make_run(self.config)
        self.good = {row["run"]: row for row in run_rows(Comparison(read_runs([self.run.path.parent])[0]))}
        self.files = {name: (self.run.path / name).read_bytes() for name in FILES}

    def restore(self):
        for folder in self.run.path.parent.glob(f"{self.run.path.name}*"):
            shutil.rmtree(folder)
        self.run.path.mkdir()
        for name, text in self.files.items():
            (self.run.path / name).write_bytes(text)

    def damage(self, name, how, what):
        if how == "folder":
            (self.run.path / name).unlink()
            (self.run.path / name).mkdir()
        else:
            (self.run.path / name).write_bytes(damaged(self.files[name], name, how, what))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study(tmp_path_factory.mktemp("records"))


@property_of(120)
@given(st.sampled_from(FILES), DAMAGES)
def test_a_damaged_record_is_skipped_and_named_and_never_a_wrong_row(study, name, damage):
    study.restore()
    folder, run = study.run.path.parent, study.run.path.name
    good = study.good
    study.damage(name, *damage)
    runs, skipped = read_runs([folder])
    comparison = Comparison(runs)
    build_pictures(comparison)
    rows = {row["run"]: row for row in run_rows(comparison)}
    for each in skipped:
        assert each.name == str(study.run.path) and len(str(each).splitlines()) == 1
    assert set(rows) == set(good) or (set(rows) == set(good) - {run} and skipped)
    if run in rows and damage[0] in ("cut", "garbage") and name != "env.json":
        assert rows[run] == good[run]


@property_of(120)
@given(st.sampled_from(FILES), DAMAGES)
def test_a_damaged_record_stops_no_sweep(study, name, damage):
    study.restore()
    study.damage(name, *damage)
    run = study.run
    status, summary = run.read_status(), run.read_summary()
    assert status is None or isinstance(status["status"], str)
    assert summary is None or isinstance(summary, dict)
    try:
        if damage[0] != "folder":
            run.cut_metrics(3)
            assert {row["step"] for row in run.read_metrics()} <= {1, 2, 3} or damage[0] == "value"
        assert RunDir.create(study.config, "command").read_status()["status"] == "running"
    except ConfigError as error:
        assert_one_line(error)


# Damaged checkpoints

LENGTHS = (3, 5)  # elements of a parameter that each of two ranks holds
CHECKPOINT_FILES = (DESCRIPTION, CHECKSUMS, rank_file(0), rank_file(1))


def write_checkpoint(run, samples):
    """A checkpoint as a world of two leaves it; its weights are its number of samples."""
    folder = run.path / "checkpoints" / f"samples-{samples}"
    folder.mkdir(parents=True)
    for rank, length in enumerate(LENGTHS):
        weights = {key_of("weight", "weight", sum(LENGTHS[:rank])): torch.full((length,), float(samples))}
        save_file(weights, folder / rank_file(rank))
    seal(folder, {"samples": samples}, [checksum_of(folder / rank_file(rank)) for rank in (0, 1)])


@property_of(250)
@given(
    st.sampled_from(CHECKPOINT_FILES),
    st.one_of(
        st.tuples(st.just("flipped"), st.tuples(st.floats(0, 1), st.integers(1, 255))),
        st.tuples(st.just("flipped"), st.tuples(st.just(1.0), st.integers(1, 255))),
        st.tuples(st.just("cut"), st.floats(0, 1)),
        st.tuples(st.just("garbage"), GARBAGE),
        st.tuples(st.just("removed"), st.none()),
    ),
)
def test_a_damaged_checkpoint_is_passed_over_in_one_line_and_never_loaded_in_part(study, capsys, name, damage):
    study.restore()
    for samples in (64, 96, 128):
        write_checkpoint(study.run, samples)
    (study.run.path / "checkpoints" / "samples-x").mkdir()
    newest = study.run.path / "checkpoints" / "samples-128"
    assert find_resume(study.config, study.run) == newest
    how, what = damage
    if how == "removed":
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(damaged((newest / name).read_bytes(), name, how, what))
    capsys.readouterr()
    found = find_resume(study.config, study.run)
    (told,) = capsys.readouterr().err.splitlines()
    assert found == newest.with_name("samples-96")
    assert f"{newest}: damaged, passed over" in told and name in told
    assert Reader(found).read("weight", "weight", 1, 6).tolist() == [96.0] * 6
    with pytest.raises(ConfigError) as refused:
        resolve_resume(str(newest))
    assert_one_line(refused.value)
    assert f"train.resume={newest}: damaged" in str(refused.value) and name in str(refused.value)


# Pickles


def test_no_pickle_is_read():
    for path in (ROOT / "harness").rglob("*.py"):
        for call in re.findall(r"torch\.load\([^)]*\)", path.read_text()):
            assert "weights_only=True" in call, (path, call)
        assert not re.search(r"^\s*(import|from) (pickle|dill|shelve|marshal)\b", path.read_text(), re.MULTILINE), path
