"""From a command line to a config: Hydra, its long answers reduced to one line."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.checkpoint_folder import resolve_resume
from harness.config import (
    GROUPS,
    Config,
    ConfigError,
    LaunchConfig,
    LRConfig,
    PlanConfig,
    TrainConfig,
    WandbConfig,
    one_line,
    register_schemas,
    resolve,
    to_config,
)
from harness.data import open_data
from harness.ds_config import check_passthrough
from harness.hf_config import check_limits
from harness.kernels import check_kernels

CONF = Path(__file__).resolve().parent.parent / "conf"
RANK_BYTES = 260_000_000  # of its own that a CPU rank holds before the model counts, measured with gpt2_tiny


def run_hydra(arguments: list[str], task: Callable[[DictConfig], Any]) -> None:
    """Hydra's own command line; ``task`` gets each composed config, and none for ``--help`` or ``--cfg``.

    What ``task`` raises ends a multirun there.

    Raises:
        ConfigError: whatever Hydra refuses, in one line that keeps its list of options.
        SystemExit: as Hydra ends its own commands.
        BaseException: what ``task`` raised.
    """
    register_schemas()
    sys.argv = [sys.argv[0], *arguments]
    raised: list[BaseException] = []

    def guarded(composed: DictConfig) -> Any:
        try:
            return task(composed)
        except BaseException as error:  # kept from Hydra, which would print it in its own way
            raised.append(error)
            sys.exit()

    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand its own exceptions to us
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(guarded)()
    except Exception as error:
        raise ConfigError(told_by_hydra(error)) from error
    except SystemExit:
        if not raised:
            raise
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
    if raised:
        raise raised[0]


def told_by_hydra(error: BaseException) -> str:
    """The message of Hydra or OmegaConf in one line: what, and the options there are."""
    text = str(error).split("Config search path")[0].split("full_key:")[0].split("Set the environment")[0]
    heading, _, options = text.partition("Available options")
    line = " ".join(heading.split()).removeprefix("In 'config': ")
    line = re.sub(r"\. To append to your config use \S+", "", line)
    names = [name.strip() for name in options.splitlines()[1:] if name.strip() and not name.strip().endswith("_schema")]
    if names:
        line += f"; choose one of {', '.join(names)}"
    elif (cause := error.__cause__) is not None and str(cause).splitlines()[0] not in line:
        line += f" ({str(cause).splitlines()[0]})"
    unknown = re.search(r"Could not override '([\w.]+)'", line)
    near = difflib.get_close_matches(unknown[1], known_keys(), n=1) if unknown else []
    return f"{line}; did you mean {near[0]}?" if near else line


def known_keys() -> list[str]:
    """Every key of the configs, dotted."""
    keys = [field.name for field in fields(Config)]
    schemas: dict[str, list[type]] = {
        **{g: [*kinds.values()] for g, kinds in GROUPS.items()},
        "lr": [LRConfig],
        "train": [TrainConfig],
    }
    schemas |= {"launch": [LaunchConfig], "plan": [PlanConfig], "wandb": [WandbConfig]}
    for group, kinds in schemas.items():
        keys += [f"{group}.{field.name}" for kind in kinds for field in fields(kind)]
    return keys


def decide(composed: DictConfig, world_size: int, gpus: int) -> Config:
    """The resolved config of a run, with everything checked that can be known before a rank starts.

    Raises:
        ConfigError: in one line.
    """
    try:
        config = resolve(to_config(composed), world_size, on_gpu=gpus > 0)
        check_passthrough(config)
        check_kernels(config.model)
        open_data(config, check_limits(config))
        config.train.resume = resolve_resume(config.train.resume)
    except (OSError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(one_line(error, 300)) from error
    return config


def check_ranks(ranks: int, gpus: int) -> None:
    """Refuse more ranks on this machine than it has GPUs or, without any, than its memory holds.

    Raises:
        ConfigError: naming the most there can be.
    """
    if 0 < gpus < ranks:
        raise ConfigError(f"launch.world_size={ranks}: this machine shows {gpus} GPUs; start at most one rank per GPU")
    memory = psutil.virtual_memory().total
    if gpus == 0 and ranks * RANK_BYTES > memory:
        raise ConfigError(
            f"launch.world_size={ranks}: a rank takes {RANK_BYTES / 1e9:.2f} GB of memory or more, and this machine has "
            f"{memory / 1e9:.0f} GB; start at most {memory // RANK_BYTES} ranks"
        )


def reproducing_command(world_size: int) -> str:
    """A command that runs the config Hydra has just composed, on its own, in a world of this size."""
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith("launch.world_size=")]
    return shlex.join(["python", "harness/main.py", *overrides, f"launch.world_size={world_size}"])


def refuse_multirun() -> None:
    """Hydra knows more ways to ask for a sweep than the one the harness knows.

    Raises:
        ConfigError: in a multirun, or for an exp that is one, that was not asked for with ``-m``.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("hydra.mode=MULTIRUN: ask for a sweep with -m")
    if HydraConfig.get().sweeper.get("params"):
        raise ConfigError("+exp: this one is a sweep (it sets hydra.sweeper.params); run it with -m")
