"""Data sets: splits, prompts and streams give the samples, the targets and the losses that they should."""

import json
import time

import datasets
import numpy as np
import pytest
import torch

import harness.data
from harness.config import ConfigError
from harness.data import HELD_OUT, IGNORED, Data, SplitCorpus, open_data
from harness.stream import StreamedCorpus
from tests import test_equivalence
from tests.test_checkpoint import BASE, SAVED, resume, save_and_go_on
from tests.test_equivalence import SGD, TINY, engine_loops, plain_loop
from tests.worlds import compose, run_world

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def made_rows(count):
    """Prompts and responses of all lengths, empty ones included."""
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, 9, (count, 2))
    return {
        "prompt": [" ".join(np.roll(WORDS, i)[: draws[i, 0]]) for i in range(count)],
        "text": [" ".join(np.roll(WORDS, 3 * i)[: draws[i, 1]]) for i in range(count)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same 240 rows as a data set with splits on disk, as three JSON files and as a Parquet file."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = datasets.Dataset.from_dict(made_rows(240))
    splits = {"train": rows, "validation": rows.select(range(200, 240))}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    for number in range(3):
        part = "".join(json.dumps(row) + "\n" for row in rows.select(range(80 * number, 80 * number + 80)))
        (folder / f"part{number}.jsonl").write_text(part)
    rows.to_parquet(folder / "rows.parquet", batch_size=32)
    return folder


def hub(folder, *overrides):
    return ["data=hub", f"data.cache_dir={folder}/cache", "data.seq_len=32", *overrides]


def saved(folder, *overrides):
    return hub(folder, f"data.path={folder}/saved", *overrides)


def streamed(folder, *overrides):
    return hub(folder, "data.streaming=true", "data.name=json", f"data.files={folder}/part*.jsonl", *overrides)


PROMPTS = "data.prompt_column=prompt"
UNPACKED = "data.pack=false"
KINDS = [[], [UNPACKED], [PROMPTS], [PROMPTS, UNPACKED]]


def instructions(tmp_path, *overrides):
    rows = {"prompt": ["ab", "abcdefghij", "k"], "response": ["cd", "xyz", ""]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "small")
    return open_data(
        compose(
            "data=hub", f"data.path={tmp_path}/small", "data.column=response", PROMPTS, "data.seq_len=8",
            "data.eval_samples=0", "batch.global_size=2", f"data.cache_dir={tmp_path}/cache", *overrides,
        ),
        256,
    )  # fmt: skip


def test_prompts_are_read_and_never_predicted(tmp_path):
    x = IGNORED
    data = instructions(tmp_path, UNPACKED)
    assert data.corpus.train_size == 3  # not the first eight tokens of the second prompt
    ids, labels = data.batch(np.arange(3))
    assert ids.tolist() == [[97, 98, 99, 100, 0, 0, 0, 0], [105, 106, 120, 121, 122, 0, 0, 0], [107, *[0] * 7]]
    assert labels.tolist() == [[x, x, 99, 100, 0, x, x, x], [x, x, 120, 121, 122, 0, x, x], [x, 0, *[x] * 6]]
    assert [data.targets(np.array([i])) for i in range(3)] == [3, 4, 1]


def test_prompts_are_masked_across_packed_documents(tmp_path):
    x = IGNORED
    data = instructions(tmp_path)
    ids, labels = data.batch(np.arange(2))
    assert [bytes(row.tolist()) for row in ids] == [b"abcd\0abc", b"defghijx"]
    assert labels.tolist() == [[x, x, 99, 100, 0, x, x, x], [*[x] * 7, 120]]
    assert data.targets(np.arange(2)) == 4


def test_sequences_without_a_target_are_left_out_before_samples_are_counted(folder):
    for kind in (KINDS[2], KINDS[3]):
        data = open_data(compose(*saved(folder, *kind)), 256)
        indices = np.arange(data.corpus.train_size + 64)
        _, labels = data.batch(indices)
        targets = (labels[:, 1:] != IGNORED).sum(1)
        assert targets.min() >= 1
        assert targets.tolist() == [data.targets(np.array([i])) for i in indices]


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[3]])
def test_instruction_data_gives_the_losses_of_a_plain_loop_on_one_and_two_ranks(folder, kind):
    shared = [*TINY, *SGD, *saved(folder, *kind), "train.steps=5"]
    losses, evaluation, _ = plain_loop(compose(*shared))
    for world_size in (1, 2):
        engines = ["zero=stage3", "engine=ddp"]
        configs = [compose(*shared, e, "batch.micro_size=2", world_size=world_size) for e in engines]
        for result in run_world(world_size, engine_loops, configs)[0]:
            assert result[0] == pytest.approx(losses, rel=1e-5)
            assert result[1] == pytest.approx(evaluation, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1


def sequences_on_disk(folder, kind):
    """Every sequence of the corpus in the order of its documents."""
    corpus = open_data(compose(*saved(folder, *kind), "data.eval_samples=0"), 256).corpus
    return [corpus.tokens(i).tolist() for i in range(corpus.train_size)]


def test_json_files_are_a_data_set_without_streaming_too(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    overrides = hub(
        tmp_path, "data.name=json", f"data.files=['{folder}/part0.jsonl','{folder}/part[12].jsonl']", PROMPTS
    )
    corpus = open_data(compose(*overrides, "data.eval_samples=0"), 256).corpus
    assert [corpus.tokens(i).tolist() for i in range(corpus.train_size)] == sequences_on_disk(folder, [PROMPTS])


def check_stream(data, held_out, training):
    """The stream's held-out sequences, and twice all of the others in their order, from wherever one asks."""
    corpus, size = data.corpus, len(training)
    assert [corpus.tokens(i).tolist() for i in corpus.eval_indices()] == held_out
    for first in (0, 5, size - 3, 0, size + 7, 2 * size - 1):
        indices = np.arange(first, first + 16)
        wanted = [training[i % size] for i in indices]
        assert corpus.targets(indices).tolist() == [sum(t >= 0 for t in tokens[1:]) for tokens in wanted]
        assert [corpus.tokens(i).tolist() for i in indices] == wanted


@pytest.mark.parametrize("spacing", [5, 10**9], ids=["bookmarks", "no bookmark"])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_stream_is_the_corpus_on_disk_from_any_sequence_on(folder, kind, spacing, monkeypatch, tmp_path):
    monkeypatch.setattr(StreamedCorpus, "SPACING", spacing)
    monkeypatch.setattr("harness.documents.PART", 100)
    sequences = sequences_on_disk(folder, kind)
    assert len(sequences) > 100
    for source in (
        ["data.name=json", f"data.files={folder}/part*.jsonl"],
        ["data.name=parquet", f"data.files=[{folder}/rows.parquet]"],
        [f"data.path={folder}/saved"],
    ):
        overrides = hub(tmp_path, *source, "data.streaming=true", "data.eval_samples=7", *kind)
        for _ in range(2):  # the second finds the first one's bookmarks
            check_stream(open_data(compose(*overrides), 256), sequences[:7], sequences[7:])
    kept = list((tmp_path / "cache").glob("*/*.json"))
    assert bool(kept) == (spacing == 5)


def test_a_stream_goes_on_from_the_nearest_bookmark(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(StreamedCorpus, "SPACING", 20)
    monkeypatch.setattr("harness.documents.PART", 100)
    overrides = streamed(folder, "data.eval_samples=3", f"data.cache_dir={tmp_path}")
    got, read = [], []
    for _ in range(2):
        stream = open_data(compose(*overrides), 256)
        encode, documents = stream.corpus.training._encode, []
        stream.corpus.training._encode = lambda part: documents.extend(part) or encode(part)  # noqa: B023
        got.append(stream.batch(np.arange(90, 100)))
        read.append(len(documents))
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][1], got[1][1])
    assert read[0] > 100
    assert 10 <= read[1] <= read[0] / 3  # those of sequences 80 to 99


def test_ranks_share_a_streams_batches_whatever_the_world_and_the_update(folder, tmp_path):
    overrides = streamed(folder, PROMPTS, UNPACKED, "data.eval_samples=5", f"data.cache_dir={tmp_path}")
    whole = open_data(compose(*overrides), 256)
    expected = {}
    for step in (0, 1, 12, 30):
        targets, (batch,) = whole.update_batches(step, 16, 16, 0, 1)
        expected[step] = (targets, batch)
        assert targets == int((batch[1][:, 1:] != IGNORED).sum())
    for world, micro in ((2, 4), (4, 1)):
        ranks = [open_data(compose(*overrides), 256) for _ in range(world)]
        for step, (targets, (ids, labels)) in expected.items():
            parts = []
            for rank, data in enumerate(ranks):
                got_targets, batches = data.update_batches(step, 16, micro, rank, world)
                assert got_targets == targets
                parts += list(batches)
            assert torch.equal(torch.cat([part for part, _ in parts]), ids)
            assert torch.equal(torch.cat([part for _, part in parts]), labels)


class InOrder:
    """Sequences one after the other, over and over."""

    train_size = None

    def __init__(self, corpus, first):
        self.corpus, self.first = corpus, first

    def tokens(self, index):
        return self.corpus.tokens(self.first + index % (self.corpus.train_size - self.first))


@pytest.mark.parametrize("kind", [[], [PROMPTS, UNPACKED]], ids=" ".join)
def test_a_streamed_run_equals_the_same_data_read_from_disk(folder, kind, monkeypatch):
    shared = [*TINY, *SGD, "data.eval_samples=13"]
    stored = open_data(compose(*shared, *saved(folder, *kind), "data.eval_samples=0"), 256).corpus
    corpus = SplitCorpus(InOrder(stored, 13), [stored.tokens(i) for i in range(13)], "")
    overrides = [*shared, *streamed(folder, *kind), "train.steps=12"]  # more than an epoch of the packed stream
    assert kind or stored.train_size < 12 * 16
    with monkeypatch.context() as patch:
        patch.setattr(test_equivalence, "open_data", lambda *_: Data(corpus, 0, 32))
        losses, evaluation, _ = plain_loop(compose(*overrides))
    for world_size in (1, 2):
        config = compose(*overrides, "zero=stage2", "batch.micro_size=4", world_size=world_size)
        (result,) = run_world(world_size, engine_loops, [config])[0]
        assert result[0] == pytest.approx(losses, rel=1e-5)
        assert result[1] == pytest.approx(evaluation, rel=1e-5)


def test_a_streamed_run_resumes_at_the_same_samples(folder, tmp_path):
    """Bit for bit in place, and to rounding on one rank, after five of eight updates."""
    overrides = [*BASE, *streamed(folder, PROMPTS), "zero=stage1", f"data.cache_dir={tmp_path}/cache"]
    config = compose(*overrides, world_size=2)
    ((losses, weights),) = run_world(2, save_and_go_on, [(config, str(tmp_path))])[0]
    ((resumed, resumed_weights),) = run_world(2, resume, [(config, str(tmp_path))])[0]
    assert resumed == losses[SAVED:]
    assert all(torch.equal(resumed_weights[name], weight) for name, weight in weights.items())
    ((alone, _),) = run_world(1, resume, [(compose(*overrides), str(tmp_path))])[0]
    assert alone == pytest.approx(losses[SAVED:], rel=2e-5)


@pytest.mark.parametrize("source", [saved, streamed])
def test_another_split_is_evaluated_and_all_of_the_first_trained_on(folder, source, tmp_path):
    if source is streamed:  # a folder of files named after their splits is a data set
        (tmp_path / "files").mkdir()
        for split, rows in datasets.load_from_disk(folder / "saved").items():
            if len(rows):
                rows.to_json(tmp_path / "files" / f"{split}.jsonl")
        overrides = hub(tmp_path, "data.streaming=true", f"data.name={tmp_path}/files", UNPACKED)
    else:
        overrides = saved(folder, UNPACKED)
    data = open_data(compose(*overrides, "data.eval_split=validation", "data.eval_samples=20"), 256)
    sequences = sequences_on_disk(folder, [UNPACKED])
    validation = open_data(compose(*saved(folder, UNPACKED, "data.split=validation"), "data.eval_samples=0",
                                   "batch.global_size=1"), 256).corpus  # fmt: skip
    assert [data.corpus.tokens(i).tolist() for i in range(len(sequences))] == sequences
    assert data.corpus.eval_indices().tolist() == list(range(HELD_OUT, HELD_OUT + 20))
    for place, index in enumerate(data.corpus.eval_indices()):
        assert np.array_equal(data.corpus.tokens(index), validation.tokens(place))
    targets, batches = data.eval_batches(8, 0, 1)
    assert targets == int((torch.cat([labels for _, labels in batches])[:, 1:] != IGNORED).sum())
    without = open_data(compose(*overrides, "data.eval_samples=20"), 256).corpus
    assert without.fingerprint != data.corpus.fingerprint
    if source is saved:
        assert data.corpus.train_size == without.train_size + 20 == len(sequences)


def test_a_row_without_text_is_named(tmp_path):
    rows = {"prompt": ["a", None, "b"], "text": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    small = [PROMPTS, "batch.global_size=1", "data.seq_len=2", "data.eval_samples=0"]
    with pytest.raises(ConfigError, match=r"^data.prompt_column=prompt: row 1 holds NoneType, not text$"):
        open_data(compose(*saved(tmp_path, *small)), 256)
    with pytest.raises(ConfigError, match=r"^data.prompt_column=prompt: a row holds NoneType, not text$"):
        open_data(compose(*saved(tmp_path, "data.streaming=true", *small)), 256)


def test_a_stream_too_short_to_train_on_is_refused(folder, tmp_path):
    size = len(sequences_on_disk(folder, []))
    for held_out, words in ((size, "leave none to train on"), (size + 1, f"has {size} sequences of 32 tokens")):
        overrides = streamed(folder, f"data.eval_samples={held_out}", f"data.cache_dir={tmp_path}")
        with pytest.raises(ConfigError, match=words):
            open_data(compose(*overrides), 256)


def open_counted(world, config, log):
    """Where a rank's tokens lie, once all ranks have opened the data at the same moment; builds go to a log."""
    build = harness.data.build_tokens

    def build_slowly(source, data, folder):
        with open(log, "a") as file:
            file.write(f"{world.rank}\n")
        time.sleep(1)
        build(source, data, folder)

    harness.data.build_tokens = build_slowly
    torch.distributed.barrier()
    data = open_data(config, 256)
    return data.corpus.array.filename, data.corpus.fingerprint, data.batch(data.indices(0, 8))[0]


def test_one_of_four_processes_builds_the_cache_of_several_files_and_all_read_it(folder, tmp_path):
    config = compose("data=text", f"data.path={folder}/part*.jsonl", f"data.cache_dir={tmp_path}", world_size=4)
    results = run_world(4, open_counted, config, str(tmp_path / "builds"))
    assert len((tmp_path / "builds").read_text().splitlines()) == 1
    assert len({name for name, _, _ in results}) == len({fingerprint for _, fingerprint, _ in results}) == 1
    assert all(torch.equal(ids, results[0][2]) for _, _, ids in results)
    text = b"\0".join((folder / f"part{number}.jsonl").read_bytes() for number in range(3)) + b"\0"
    assert np.load(results[0][0]).tobytes() == text
