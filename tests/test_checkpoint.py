"""Checkpoints: resumed equals uninterrupted, bit for bit in place and to rounding in any other world, stage or engine."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from harness.checkpoint import Checkpoints
from harness.checkpoint_folder import damage_of, find_checkpoints, resolve_resume
from harness.config import ConfigError, total_steps
from harness.data import open_data
from harness.engines import build_engine
from harness.export import export
from harness.hf_config import check_limits
from harness.server import Server
from tests.test_equivalence import TINY
from tests.worlds import compose, run_world

STEPS, SAVED = 8, 5
BASE = [*TINY, f"train.steps={STEPS}", "train.checkpoint_every=16", "train.keep=2"]
ENGINES = [*(f"zero=stage{stage}" for stage in range(4)), "engine=ddp", "engine=fsdp"]
ASYNC = ["parallel=async", "parallel.workers=3", "parallel.clock=exponential"]


def steps_of(world, config, engine, server, first, last):
    """Losses of updates ``first`` … ``last - 1``, of all ranks together."""
    data = open_data(config, check_limits(config))
    batch, losses = config.batch, []
    for step in range(first, last):
        targets, batches = data.update_batches(step, batch.global_size, batch.micro_size, world.rank, world.size)
        batches, loss = list(batches), torch.zeros(())
        for number, (ids, labels) in enumerate(batches):
            loss += engine.forward_backward(ids, labels, torch.tensor(float(targets)), number == len(batches) - 1)
        engine.step(server.begin_update(last=step + 1 == total_steps(config)))
        server.end_update()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item())
    return losses


def checkpoints_of(world, config, engine, server, folder):
    return Checkpoints(config, world, engine, server, "corpus", Path(folder))


def save_and_go_on(world, cases):
    """Losses and weights of an uninterrupted run that leaves a checkpoint on its way."""
    results = []
    for config, folder in cases:
        engine = build_engine(config, world)
        server = Server(config, world, engine)
        losses = steps_of(world, config, engine, server, 0, SAVED)
        checkpoints_of(world, config, engine, server, folder).save(SAVED - 1, {})
        losses += steps_of(world, config, engine, server, SAVED, STEPS)
        results.append((losses, engine.full_parameters()))
    return results


def resume(world, cases):
    """Losses from the checkpoint on and weights of a run that resumes it."""
    results = []
    for config, folder in cases:
        engine = build_engine(config, world)
        server = Server(config, world, engine)
        (path,) = find_checkpoints(Path(folder) / "checkpoints")
        saved = checkpoints_of(world, config, engine, server, folder).load(path)
        losses = steps_of(world, config, engine, server, saved["step"], STEPS)
        results.append((losses, engine.full_parameters()))
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An uninterrupted run of each kind in a world of two, with a checkpoint after five of eight updates."""
    kinds = [
        *itertools.product(ENGINES, ([], ASYNC)),
        ("zero=stage1", ["optimizer=sgd"]),
        ("zero=stage3", ["precision=bf16"]),
    ]
    folders = {(engine, *more): tmp_path_factory.mktemp("run") for engine, more in kinds}
    cases = [(compose(*BASE, *kind, world_size=2), str(folder)) for kind, folder in folders.items()]
    return dict(zip(folders, zip(folders.values(), run_world(2, save_and_go_on, cases)[0], strict=True), strict=True))


def test_resumed_in_place_equals_uninterrupted_bit_for_bit(saved):
    cases = [(compose(*BASE, *kind, world_size=2), str(folder)) for kind, (folder, _) in saved.items()]
    for (kind, (_, (losses, weights))), resumed in zip(saved.items(), run_world(2, resume, cases)[0], strict=True):
        assert resumed[0] == losses[SAVED:], kind
        for name, weight in weights.items():
            assert torch.equal(resumed[1][name], weight), (kind, name)


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_resumed_in_any_other_world_stage_or_engine_follows_the_same_curve(saved, world_size):
    """Every kind of checkpoint, resumed at the next kind, with another micro batch."""
    kinds = [kind for kind in saved if "precision=bf16" not in kind and "optimizer=sgd" not in kind]
    sync, delayed = [k for k in kinds if len(k) == 1], [k for k in kinds if len(k) > 1]
    pairs = [(a, b) for group in (sync, delayed) for a, b in zip(group, [*group[1:], group[0]], strict=True)]
    cases = [
        (compose(*BASE, *into, "batch.micro_size=2", world_size=world_size), str(saved[source][0]))
        for source, into in pairs
    ]
    for (source, into), (losses, weights) in zip(pairs, run_world(world_size, resume, cases)[0], strict=True):
        expected_losses, expected = saved[source][1]
        assert losses == pytest.approx(expected_losses[SAVED:], rel=2e-5), (source, into)
        for name, weight in expected.items():
            distance = (weights[name] - weight).norm() / weight.norm().clamp_min(1e-2)
            assert distance < 2e-3, (source, into, name, distance)


def load_refused(world, config, folder):
    engine = build_engine(config, world)
    server = Server(config, world, engine)
    (path,) = find_checkpoints(Path(folder) / "checkpoints")
    try:
        checkpoints_of(world, config, engine, server, folder).load(path)
    except ConfigError as error:
        return str(error)
    return "loaded"


def test_what_does_not_fit_or_is_damaged_is_refused(saved, tmp_path):
    folder = saved[("zero=stage3",)][0]
    for overrides, words in (
        (["seed=1"], "its seed is 0, this run's is 1"),
        (["optimizer=sgd"], "its optimizer is adamw"),
        (["batch.global_size=32"], "after 80 samples no update of batch.global_size=32 begins"),
        (["model.config.n_layer=2"], "n_params"),
    ):
        refused = run_world(1, load_refused, compose(*BASE, *overrides), str(folder))[0]
        assert words in refused, refused
    shutil.copytree(folder, tmp_path / "damaged")
    (whole,) = find_checkpoints(tmp_path / "damaged" / "checkpoints")
    (whole / "rank-1.safetensors").unlink()
    refused = run_world(1, load_refused, compose(*BASE), str(tmp_path / "damaged"))[0]
    assert "it is damaged" in refused
    description = json.loads((whole / "checkpoint.json").read_text())
    (whole / "checkpoint.json").write_text(json.dumps(description | {"format": 99}))
    assert "of format 99" in run_world(1, load_refused, compose(*BASE), str(tmp_path / "damaged"))[0]


def test_a_byte_that_changed_is_found_in_what_any_engine_wrote(saved, tmp_path):
    for number, (kind, (folder, _)) in enumerate(saved.items()):
        shutil.copytree(folder, tmp_path / str(number))
        (path,) = find_checkpoints(tmp_path / str(number) / "checkpoints")
        assert damage_of(path) == "", kind
        file = sorted(path.glob("rank-*.safetensors"))[-1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        for refuse in (lambda p=path: resolve_resume(str(p)), lambda p=path: export(p, tmp_path / "out")):
            with pytest.raises(ConfigError, match=rf"{path}: damaged \({file.name} is not what .*; give another$"):
                refuse()


def keep_two(world, config, folder):
    engine = build_engine(config, world)
    server = Server(config, world, engine)
    checkpoints = checkpoints_of(world, config, engine, server, folder)
    for step in range(4):
        checkpoints.save(step, {})
    return [path.name for path in find_checkpoints(Path(folder) / "checkpoints")]


def test_only_the_newest_are_kept_and_a_part_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / ".samples-999").mkdir(parents=True)
    kept = run_world(2, keep_two, compose(*BASE, "zero=stage1", world_size=2), str(tmp_path))
    assert kept == [["samples-48", "samples-64"]] * 2
