"""Real worlds for tests: ranks forked from a process that has imported everything, joined over gloo."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.config import Config, resolve
from harness.environment import RANK_VARIABLES
from harness.launch import free_port
from tests.run_factory import compose_config

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preload"])


def compose(*overrides: str, world_size: int = 1, on_gpu: bool = False) -> Config:
    """The resolved config of a command line."""
    return resolve(copy.deepcopy(compose_config(overrides)), world_size, on_gpu)


def run_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each rank of one world.

    Raises:
        AssertionError: with the traceback of the first rank that raised.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = FORKS.Pipe(duplex=False)
            target_arguments = (theirs, rank, size, port, folder, function, arguments)
            process = FORKS.Process(target=be_rank, args=target_arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = []
        for rank, pipe in enumerate(pipes):
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                results.append(("raised", f"rank {rank} died with {processes[rank].exitcode}"))
        for process in processes:
            process.join()
        logs = "".join(path.read_text() for path in Path(folder).glob("*.log"))
    for kind, value in results:
        assert kind == "returned", f"{value}\n{logs[-2000:]}"
    return [value for _, value in results]


def be_rank(pipe: Any, rank: int, size: int, port: int, folder: str, function: Any, arguments: Any) -> None:
    """A forked rank: quiet, joined to its world, gone without interpreter shutdown."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for key in RANK_VARIABLES:
        os.environ.pop(key, None)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch

    from harness.ranks import World

    torch.set_num_threads(1)
    try:
        world = World.join()
        world.init_process_group()
        pipe.send_bytes(pickle.dumps(("returned", function(world, *arguments))))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("raised", f"rank {rank}: {traceback.format_exc()}")))
    pipe.close()
    os._exit(0)
