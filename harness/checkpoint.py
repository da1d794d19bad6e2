"""Checkpoints: one format for every engine, ZeRO stage and world.

A checkpoint holds, for each parameter, its fp32 weight, the optimizer's moments and what asynchrony has pending, in
fragments: each rank writes what it owns of them to a safetensors file of its own. Any other rank of any other world
or stage assembles what it needs from those files, so resuming elsewhere needs no conversion, and no pickle is read.
The folder appears whole, by a rename, or not at all, and with checksums, which are written with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from harness.checkpoint_folder import checksum_of, find_checkpoints, rank_file, read_description, seal
from harness.config import Config, ConfigError
from harness.delayed import DelayedOptimizer
from harness.measure.memory import local_part

if TYPE_CHECKING:
    from harness.engines import Engine
    from harness.ranks import World
    from harness.server import Server

WEIGHT = "weight"
PENDING = "pending/"


@dataclass
class Fragment:
    """A stretch of one flattened parameter that this rank's optimizer updates.

    Attributes:
        start: its first element in the flattened parameter.
        owner: the fp32 tensor, whole or a shard, that the optimizer updates and that contains it.
        offset: its first element in the flattened owner.
    """

    name: str
    start: int
    length: int
    owner: torch.Tensor
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This stretch of a tensor that has the owner's shape; it shares the tensor's memory."""
        return local_part(tensor).detach().view(-1)[self.offset : self.offset + self.length]


class Checkpoints:
    """The checkpoints of one run, in ``checkpoints/samples-N``."""

    def __init__(self, config: Config, world: World, engine: Engine, server: Server, fingerprint: str, path: Path):
        self.folder = path / "checkpoints"
        self.config = config
        self.world = world
        self.engine = engine
        self.server = server
        self.fingerprint = fingerprint

    def due(self, step: int, steps: int) -> bool:
        """After the last update, and after each that passes a multiple of ``train.checkpoint_every`` samples."""
        every, size = self.config.train.checkpoint_every, self.config.batch.global_size or 1
        return every is not None and (step + 1 == steps or (step + 1) * size // every > step * size // every)

    def save(self, step: int, record: dict[str, Any]) -> None:
        """Write the state after update ``step`` (from 0); a collective.

        Args:
            record: JSON of the recorder, to go on where it was.
        """
        samples = (step + 1) * (self.config.batch.global_size or 1)
        whole, part = self.folder / f"samples-{samples}", self.folder / f".samples-{samples}"
        if self.world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        owners = self.world.size if self.engine.sharded else 1
        checksums = [0.0] * owners
        if self.world.rank < owners:
            file = part / rank_file(self.world.rank)
            save_file(dict(self._tensors()), file)
            checksums[self.world.rank] = float(checksum_of(file))
        checksums = self.world.max_over_ranks(checksums)
        if self.world.rank == 0:
            seal(part, self._description(step, samples, record), [int(each) for each in checksums])
            shutil.rmtree(whole, ignore_errors=True)
            part.rename(whole)
            found = find_checkpoints(self.folder)
            # Those of later updates belong to a past that was given up.
            kept = found[: found.index(whole) + 1][-self.config.train.keep :]
            for other in set(found) - set(kept):
                shutil.rmtree(other)
        dist.barrier()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for fragment in self.engine.fragments():
            for kind, tensor in state_of(self.engine.optimizer, fragment.owner).items():
                yield key_of(fragment.name, kind, fragment.start), fragment.of(tensor).cpu().clone()
        yield "rng/cpu", torch.get_rng_state()
        if torch.cuda.is_available():
            yield "rng/cuda", torch.cuda.get_rng_state()

    def _description(self, step: int, samples: int, record: dict[str, Any]) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        counters = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        return {
            "step": step + 1,
            "samples": samples,
            "seed": self.config.seed,
            "global_batch_size": self.config.batch.global_size,
            "optimizer": self.config.optimizer.kind,
            "parallel": self.config.parallel.kind,
            "world_size": self.world.size,
            "engine": self.config.engine.kind,
            "zero_stage": self.config.zero.stage,
            "n_params": self.engine.n_params,
            "corpus_fingerprint": self.fingerprint,
            "optimizer_step": counters[0] if counters else None,
            "schedule": self.server.schedule.state_dict(),
            "scalars": self.engine.scalars(),
            "recorder": record,
        }

    @torch.no_grad()
    def load(self, path: Path) -> dict[str, Any]:
        """Put a checkpoint of any world, stage and engine into this engine; its description."""
        description = read_description(path)
        self._check(path, description)
        reader = Reader(path)
        optimizer = self.engine.optimizer
        kinds = reader.kinds() - {WEIGHT}
        pending = {kind for kind in kinds if kind.startswith(PENDING)}
        for fragment in self.engine.fragments():
            fragment.of(fragment.owner).copy_(reader.read(fragment.name, WEIGHT, fragment.start, fragment.length))
            for kind in kinds - pending:
                if (fragment.name, kind) in reader:
                    moment = ensure_state(optimizer, fragment.owner, kind, description["optimizer_step"])
                    fragment.of(moment).copy_(reader.read(fragment.name, kind, fragment.start, fragment.length))
            for kind in pending:
                assert isinstance(optimizer, DelayedOptimizer)
                if (fragment.name, kind) in reader:
                    held = optimizer.pending_tensor(fragment.owner, kind.removeprefix(PENDING))
                    fragment.of(held).copy_(reader.read(fragment.name, kind, fragment.start, fragment.length))
        self.engine.refresh(lambda name, start, length: reader.read(name, WEIGHT, start, length))
        self.engine.load_scalars(description["scalars"])
        self.server.schedule.load_state_dict(description["schedule"])
        if description["world_size"] == self.world.size:
            reader.restore_rng(self.world.rank)
        return description

    def _check(self, path: Path, description: dict[str, Any]) -> None:
        config = self.config
        for key, ours, remedy in (
            ("n_params", self.engine.n_params, "resume with the same model"),
            ("optimizer", config.optimizer.kind, "resume with the same optimizer"),
            ("parallel", config.parallel.kind, "resume with the same parallel"),
            ("seed", config.seed, "resume with the same seed"),
            ("corpus_fingerprint", self.fingerprint, "the corpus has changed; restore it, or start anew"),
        ):
            if description[key] != ours:
                raise ConfigError(
                    f"train.resume={path}: its {key} is {description[key]}, this run's is {ours}; {remedy}"
                )
        size = config.batch.global_size or 1
        if description["samples"] % size or (
            config.parallel.kind == "async" and description["global_batch_size"] != size
        ):
            raise ConfigError(
                f"train.resume={path}: after {description['samples']} samples no update of batch.global_size={size} "
                f"begins; resume with batch.global_size={description['global_batch_size']}"
            )


def key_of(name: str, kind: str, start: int) -> str:
    return f"{name}|{kind}|{start}"


def state_of(optimizer: torch.optim.Optimizer, owner: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of the owner's shape that belongs to it, by kind."""
    tensors = {WEIGHT: owner}
    state = optimizer.state.get(owner, {})
    tensors |= {k: t for k, t in state.items() if torch.is_tensor(t) and t.numel() == owner.numel() and k != "step"}
    if isinstance(optimizer, DelayedOptimizer):
        tensors |= {PENDING + kind: tensor for kind, tensor in optimizer.pending_tensors(owner).items()}
    return tensors


def ensure_state(
    optimizer: torch.optim.Optimizer, owner: torch.Tensor, kind: str, counter: float | None
) -> torch.Tensor:
    """The optimizer's state tensor of a kind for an owner, made as torch would at its first step."""
    state = optimizer.state[owner]
    if counter is not None:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        state["step"] = torch.tensor(counter, dtype=torch.float32, device=owner.device if fused else "cpu")
    if not torch.is_tensor(state.get(kind)):
        state[kind] = torch.zeros_like(owner, requires_grad=False, memory_format=torch.preserve_format)
    return state[kind]


class Reader:
    """Stretches of parameters and their state from the rank files of a checkpoint, read when asked for."""

    def __init__(self, path: Path):
        self.files = {file.name: safe_open(file, framework="pt") for file in sorted(path.glob("rank-*.safetensors"))}
        if not self.files:
            raise ConfigError(f"train.resume={path}: holds no rank files")
        self.index: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
        for file_name, file in self.files.items():
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key.startswith("rng/"):
                    continue
                name, kind, start = key.split("|")
                length = file.get_slice(key).get_shape()[0]
                self.index.setdefault((name, kind), []).append((int(start), length, file_name, key))

    def __contains__(self, entry: tuple[str, str]) -> bool:
        return entry in self.index

    def kinds(self) -> set[str]:
        return {kind for _, kind in self.index}

    def read(self, name: str, kind: str, start: int, length: int) -> torch.Tensor:
        """Elements ``start`` … ``start + length - 1`` of a flattened parameter or of its state, fp32 on the CPU."""
        result = torch.empty(length)
        found = 0
        for begin, size, file_name, key in self.index.get((name, kind), []):
            low, high = max(start, begin), min(start + length, begin + size)
            if low < high:
                piece = self.files[file_name].get_slice(key)[low - begin : high - begin]
                result[low - start : high - start] = piece
                found += high - low
        if found != length:
            raise ConfigError(f"checkpoint: {name} ({kind}) has {found} of the {length} elements wanted; it is damaged")
        return result

    def restore_rng(self, rank: int) -> None:
        file = self.files.get(rank_file(rank))
        if file is not None and "rng/cpu" in file.keys():  # noqa: SIM118
            torch.set_rng_state(file.get_tensor("rng/cpu"))
            if torch.cuda.is_available() and "rng/cuda" in file.keys():  # noqa: SIM118
                torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))
