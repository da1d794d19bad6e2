"""Runs one after another inside one world, for studies of many short ones that would spend their time on starting up.

A study's script is started by torchrun, or by python as a world of one rank.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from harness.config import Config, register_schemas, resolve, to_config
from harness.data import open_data
from harness.engines import build_engine
from harness.forkserver import free_port
from harness.hf_config import check_limits
from harness.ranks import World, fix_threads

CONF = str(Path(__file__).resolve().parents[1] / "conf")


def join() -> World:
    """This process's world, its collectives up."""
    if "RANK" not in os.environ:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **address)
    world = World.join()
    fix_threads()
    world.init_process_group()
    return world


def config_of(overrides: list[str], world_size: int) -> Config:
    """The resolved config of a command line."""
    register_schemas()
    with initialize_config_dir(CONF, version_base="1.3"):
        return resolve(to_config(compose("config", overrides)), world_size, on_gpu=torch.cuda.is_available())


class Run:
    """A config's data and engine, updated by hand."""

    def __init__(self, world: World, overrides: list[str]):
        self.world = world
        self.config = config_of(overrides, world.size)
        self.data = open_data(self.config, check_limits(self.config))
        self.engine = build_engine(self.config, world)

    def update(self, step: int, rate: float, sequences: int | None = None) -> torch.Tensor:
        """Train update ``step``.

        Args:
            rate: learning rate.
            sequences: of all ranks in one micro batch, in place of the config's batch.

        Returns:
            The global mean loss, on the device.
        """
        batch, world = self.config.batch, self.world
        assert batch.global_size is not None and batch.micro_size is not None
        size, micro = batch.global_size, batch.micro_size
        if sequences is not None:
            size, micro = sequences, sequences // world.size
        targets, batches = self.data.update_batches(step, size, micro, world.rank, world.size)
        count = torch.full((), float(targets), device=world.device)
        loss = torch.zeros((), device=world.device)
        held = list(batches)
        for number, (ids, labels) in enumerate(held):
            last = number + 1 == len(held)
            loss += self.engine.forward_backward(ids.to(world.device), labels.to(world.device), count, last)
        self.engine.step(rate)
        dist.all_reduce(loss)
        return loss


def forget() -> None:
    """Give back what runs that are gone held, as far as their engines let go."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
