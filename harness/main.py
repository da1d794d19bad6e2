"""The way in: `deepspeed harness/main.py +exp=zero3`, torchrun, srun, or plain python, which starts a world itself.

Under a launcher rank 0 alone runs Hydra and publishes the resolved config; without one, this process composes it
and starts a world on it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and sys.path and Path(sys.path[0]).resolve() == ROOT / "harness":
    sys.path[0] = str(ROOT)  # no module of this folder may shadow a library

from harness.environment import (  # noqa: E402
    launchers,
    ranks_on_host,
    set_rank_environment,
    uncollected,
    visible_gpus,
    without_local_rank,
)

if TYPE_CHECKING:
    import psutil
    from omegaconf import DictConfig

    from harness.ranks import World
    from harness.screen import Screen


def main() -> None:
    open_closed_streams()
    arguments = without_local_rank(sys.argv[1:])
    if not set_rank_environment():
        run_parent(arguments)
    elif not {"-m", "--multirun"} & set(arguments):
        run_rank(arguments)
    elif os.environ["RANK"] == "0":
        run_parent(arguments, default_world_size=int(os.environ["WORLD_SIZE"]))


def open_closed_streams() -> None:
    """Where a stream was closed (``>&-``), what is written goes nowhere."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))


def run_parent(arguments: list[str], default_world_size: int | None = None) -> NoReturn:
    """Compose runs and start a world for each.

    Args:
        default_world_size: ranks of a sweep's point that does not say.
    """
    from harness.compose import run_hydra
    from harness.config import ConfigError
    from harness.launch import Stopped, stop_signals
    from harness.screen import Shown
    from harness.sweep import Sweep, is_multirun, run_once

    sweep = Sweep(arguments, default_world_size) if is_multirun(arguments) else None
    completed: list[bool] = []
    out, err = cast(TextIO, Shown(sys.stdout)), cast(TextIO, Shown(sys.stderr))
    try:
        with stop_signals(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_hydra(arguments, sweep or (lambda composed: completed.append(run_once(composed))))
            if sweep is not None:
                sweep.finish()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        if sweep is not None:
            sweep.finish()  # of the points that were done before Hydra or its launcher gave up
        sys.exit(1)
    except Stopped as stop:
        kept = (
            "with the points that are left" if sweep else "from its newest checkpoint, if train.checkpoint_every is set"
        )
        print(f"stopped: {stop}; the same command goes on {kept}", file=sys.stderr)
        sys.exit(1)
    finally:
        if sweep is not None:
            sweep.journal.remove()
    sys.exit(0 if all(completed) else 1)


def run_rank(arguments: list[str]) -> NoReturn:
    """Be one rank: get the config, composing it on rank 0, and train."""
    above = launchers()
    with uncollected():
        from harness.screen import Screen

        screen = Screen()
        faulthandler.enable()  # a crash inside a library leaves its place in the rank's log
        from harness.launch import obey
        from harness.ranks import World, leave  # noqa: F401  # torch

    world = join(screen, above)
    obey(compose_and_publish(arguments, world, screen) if world.rank == 0 else world.receive(), world, screen)


def join(screen: Screen, above: list[psutil.Process | None]) -> World:
    from harness.config import ConfigError
    from harness.ranks import World, leave

    try:
        return World.join(above)
    except ConfigError as error:
        if os.environ["RANK"] == "0":
            print(f"error: {error}", file=screen.err)
        leave(1)


def compose_and_publish(arguments: list[str], world: World, screen: Screen) -> dict[str, Any]:
    """Rank 0: decide what the world does and tell the other ranks, whatever happens here."""
    from harness.checkpoint_folder import find_resume
    from harness.compose import check_ranks, decide, refuse_multirun, reproducing_command, run_hydra
    from harness.config import ConfigError
    from harness.launch import order
    from harness.rundir import RunDir

    message: dict[str, Any] = {"exit": 0}

    def task(composed: DictConfig) -> None:
        refuse_multirun()
        gpus = visible_gpus()
        check_ranks(ranks_on_host(), gpus)
        config = decide(composed, world.size, gpus)
        run = RunDir.create(config, reproducing_command(world.size))
        message.update(order(config, run, find_resume(config, run)))

    try:
        with contextlib.redirect_stdout(screen.out), contextlib.redirect_stderr(screen.err):
            run_hydra(arguments, task)
    except ConfigError as error:
        message = {"exit": 1}
        print(f"error: {error}", file=screen.err)
    except SystemExit as end:
        message = {"exit": 0 if not end.code else 1}
    except BaseException as error:
        message = {"exit": 1}
        print(f"error: {type(error).__name__}: {error}", file=screen.err)
        traceback.print_exc()
    finally:
        world.publish(message)
    return message


if __name__ == "__main__":
    main()
