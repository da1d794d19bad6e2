"""Real worlds for tests: ranks forked from a process that has imported everything, joined over gloo."""

from __future__ import annotations

import copy
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import Config, resolve
from harness.forkserver import Ranks, places_here
from tests.run_factory import compose_config

if TYPE_CHECKING:
    from harness.ranks import World


def compose(*overrides: str, world_size: int = 1, on_gpu: bool = False) -> Config:
    """The resolved config of a command line."""
    return resolve(copy.deepcopy(compose_config(overrides)), world_size, on_gpu)


def run_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each rank of one world.

    Raises:
        AssertionError: with the traceback of a rank that raised.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Ranks(places_here(size), folder).run(be_rank, folder, function, arguments)
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
        results = {path.stem: pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.result"))}
    for value in results.values():
        assert not isinstance(value, Raised), f"{value.text}\n{logs[-2000:]}"
    assert len(results) == size, f"only ranks {', '.join(results)} ended well\n{logs[-2000:]}"
    return [results[str(rank)] for rank in range(size)]


@dataclass
class Raised:
    text: str


def be_rank(world: World, folder: Path, function: Callable[..., Any], arguments: Any) -> None:
    """A rank of a test's world: one thread, its collectives up."""
    import torch

    from harness.ranks import leave

    torch.set_num_threads(1)
    world.init_process_group()
    try:
        result = function(world, *arguments)
    except BaseException:
        result = Raised(f"rank {world.rank}: {traceback.format_exc()}")
    temporary = folder / f"{world.rank}.writing"
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(folder / f"{world.rank}.result")
    if isinstance(result, Raised):
        leave(1)
