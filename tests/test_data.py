"""Invariant 1: sample i is a pure function of (seed, corpus), and the ranks' shares are disjoint and cover the batch."""

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from harness.config import ConfigError
from harness.data import IGNORED, cut, open_data
from harness.documents import stdlib_files, text_files
from tests.worlds import compose


def text_data(tmp_path, *overrides, **documents):
    for name, text in documents.items():
        (tmp_path / f"{name}.txt").write_text(text)
    config = compose(
        "data=text", f"data.path={tmp_path}/*.txt", f"data.cache_dir={tmp_path}/cache", "data.seq_len=8",
        "batch.global_size=2", "data.eval_samples=1", *overrides,
    )  # fmt: skip
    return open_data(config, 256)


@pytest.mark.parametrize("overrides", [[], ["data=synthetic", "data.ragged=true"]])
def test_the_ranks_shares_cover_the_batch_whatever_the_split(overrides):
    data = open_data(compose(*overrides), 256)
    whole_targets, (whole,) = data.update_batches(5, 32, 32, 0, 1)
    for world, micro in ((1, 4), (2, 16), (2, 2), (4, 8), (4, 1)):
        parts = []
        for rank in range(world):
            targets, batches = data.update_batches(5, 32, micro, rank, world)
            assert targets == whole_targets
            parts += list(batches)
        assert torch.equal(torch.cat([ids for ids, _ in parts]), whole[0])
        assert torch.equal(torch.cat([labels for _, labels in parts]), whole[1])
    assert whole_targets == int((whole[1][:, 1:] != IGNORED).sum())


def test_updates_take_successive_samples_and_epochs_are_new_permutations(tmp_path):
    data = text_data(tmp_path, a="abcdefg" * 50)
    size = data.corpus.train_size
    epochs = data.indices(0, 2 * size).reshape(2, size)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(size))
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(data.indices(3, 4), data.indices(0, 7)[3:])
    assert not set(data.corpus.eval_indices()) & set(epochs[0])


def test_the_seed_orders_the_samples(tmp_path):
    first = text_data(tmp_path, a="abcdefg" * 50)
    again, other = text_data(tmp_path), text_data(tmp_path, "seed=1")
    assert np.array_equal(first.indices(0, 20), again.indices(0, 20))
    assert not np.array_equal(first.indices(0, 20), other.indices(0, 20))


def test_packing_joins_documents_and_unpacked_documents_are_padded(tmp_path):
    packed = text_data(tmp_path, a="0123456789", b="abcdefghijklmnopqrstuvwxyz")
    assert [bytes(packed.corpus.tokens(i)) for i in range(2)] == [b"01234567", b"89\0abcde"]
    padded = text_data(tmp_path, "data.pack=false")
    assert [bytes(padded.corpus.tokens(i)) for i in range(4)] == [b"01234567", b"89\0", b"abcdefgh", b"ijklmnop"]
    ids, labels = padded.batch(np.array([1, -1]))
    assert ids.tolist() == [[56, 57, 0, 0, 0, 0, 0, 0], [0] * 8]
    assert labels.tolist() == [[56, 57, 0, *[IGNORED] * 5], [IGNORED] * 8]
    assert padded.targets(np.array([0, 1])) == 9


def test_cut_leaves_out_what_has_no_target():
    starts, ends = cut(np.array([1, 10, 11, 19]), 4, pack=False)
    assert list(zip(starts, ends, strict=True)) == [(1, 5), (5, 9), (11, 15), (15, 19)]
    assert [len(part) for part in cut(np.zeros(0, dtype=np.int64), 4, pack=False)] == [0, 0]
    assert [len(part) for part in cut(np.zeros(0, dtype=np.int64), 4, pack=True)] == [0, 0]


def test_evaluation_covers_the_held_out_slice_with_equally_many_batches_per_rank():
    data = open_data(compose("data.eval_samples=13"), 256)
    for world, micro in ((1, 4), (2, 4), (4, 2)):
        shares = [list(data.eval_batches(micro, rank, world)[1]) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        labels = torch.cat([labels for share in shares for _, labels in share])
        assert int((labels[:, 1:] != IGNORED).sum()) == data.eval_batches(micro, 0, world)[0] == 13 * 127


def test_the_cache_follows_the_files(tmp_path):
    first = text_data(tmp_path, a="abcdefg" * 50)
    assert text_data(tmp_path).corpus.fingerprint == first.corpus.fingerprint
    assert text_data(tmp_path, a="gfedcba" * 50).corpus.fingerprint != first.corpus.fingerprint


def test_stdlib_is_real_text_without_tests_and_installed_packages():
    files = stdlib_files()
    assert len(files) > 300
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)


def test_text_takes_files_folders_globs_and_lists(tmp_path):
    (tmp_path / "sub").mkdir()
    names = ["b.txt", "a.txt", "sub/c.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    assert [f.name for f in text_files("data.path", [str(tmp_path)])] == ["a.txt", "b.txt", "c.txt"]
    assert [f.name for f in text_files("data.path", [f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"])] == ["b.txt", "a.txt"]
    with pytest.raises(ConfigError, match=r"x\*: no such file"):
        text_files("data.path", [f"{tmp_path}/x*"])


def test_a_saved_data_set_with_a_tokenizer_folder(tmp_path):
    words = [f"w{i}" for i in range(40)]
    texts = [" ".join(words[i : i + 9]) for i in range(30)]
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"body": texts})).save_to_disk(tmp_path / "saved")
    vocabulary = {word: number for number, word in enumerate([*words, "<end>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "tok")
    overrides = [
        "data=hub", f"data.path={tmp_path}/saved", "data.column=body", f"data.tokenizer={tmp_path}/tok",
        f"data.cache_dir={tmp_path}/cache", "data.seq_len=10", "batch.global_size=4", "data.eval_samples=2",
    ]  # fmt: skip
    data = open_data(compose(*overrides), 64)
    assert data.corpus.train_size == 28
    assert data.corpus.tokens(3).tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 40]
    with pytest.raises(ConfigError, match="has 41 tokens, the model's vocabulary only 40"):
        open_data(compose(*overrides), 40)
