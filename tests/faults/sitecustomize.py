"""Injects faults into real worlds: put this folder on PYTHONPATH. Nothing of the harness knows.

FAULTS is JSON: {"part of a run's name": [rank, update, kind]}, kinds as in FAULT_KINDS, or at update 0 as in
WANDB_KINDS and PARENT_KINDS. CONSTANTS is JSON: {"module": {"NAME": value}}, constants to be replaced, so that waits are short.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time


def run_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("injected: tried to allocate 1000 GiB")


def spoil_gradients():
    """From the next update on every gradient is NaN."""
    import torch

    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda loss, *arguments, **keywords: backward(loss * float("nan"), *arguments, **keywords)


FAULT_KINDS = {
    "oom": run_out_of_memory,
    "nan": spoil_gradients,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill server": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
WANDB_KINDS = ("wandb unreachable", "wandb slow")
listener = socket.socket()


def fault_here(run, rank):
    """Update and kind of the fault that is meant for this rank of this run, by a path of it."""
    for name, (its_rank, update, kind) in json.loads(os.environ.get("FAULTS", "{}")).items():
        if name in str(run) and its_rank == rank:
            return update, kind
    return None, None


def inject_at_updates(module):
    """Wrap the end of every update."""
    from harness.rundir import RunDir

    end_update = module.Recorder.end_update

    def wrapped(recorder, step, *arguments, **keywords):
        update, kind = fault_here(RunDir.of(recorder.config).path, recorder.world.rank)
        if step + 1 == update:
            FAULT_KINDS[kind]()
        return end_update(recorder, step, *arguments, **keywords)

    module.Recorder.end_update = wrapped


def inject_at_wandb(module):
    """Wrap the start of W&B: online, with a server that is not there, or that never answers."""
    start = module.Tracker.__init__

    def wrapped(tracker, config, run):
        _, kind = fault_here(run.path, 0)
        if kind in WANDB_KINDS:
            listener.bind(("127.0.0.1", 0))
            if kind == "wandb slow":
                listener.listen()
            os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
            os.environ["WANDB_API_KEY"] = "0" * 40
            os.environ.pop("WANDB_MODE", None)
            config.wandb.mode = "online"
        start(tracker, config, run)

    module.Tracker.__init__ = wrapped


@contextlib.contextmanager
def take_port(ranks, arguments):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for place in ranks.places:
            place["MASTER_PORT"] = str(taken.getsockname()[1])
        yield


@contextlib.contextmanager
def hide_data(ranks, arguments):
    path = re.search(r"(\S*corpus\.txt)", arguments[1]["config"])[1]
    os.rename(path, f"{path}.hidden")
    yield
    os.rename(f"{path}.hidden", path)


PARENT_KINDS = {"port taken": take_port, "data vanishes": hide_data}


def inject_at_start(module):
    """Wrap the start of a world with what is the case for its first seconds."""
    start = module.Ranks.start

    def wrapped(ranks, *arguments):
        _, kind = fault_here(ranks.logs, 0)
        with PARENT_KINDS.get(kind, lambda *_: contextlib.nullcontext())(ranks, arguments):
            start(ranks, *arguments)
            time.sleep(5 if kind in PARENT_KINDS else 0)

    module.Ranks.start = wrapped


HOOKS = {
    "harness.recorder": inject_at_updates, "harness.tracking": inject_at_wandb, "harness.forkserver": inject_at_start
}  # fmt: skip
CONSTANTS = json.loads(os.environ.get("CONSTANTS", "{}"))


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.names = {*HOOKS, *CONSTANTS}

    def find_spec(self, name, path, target=None):
        if name not in self.names:
            return None
        self.names.remove(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            vars(module).update(CONSTANTS.get(name, {}))
            if name in HOOKS:
                HOOKS[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "FAULTS" in os.environ or CONSTANTS:
    sys.meta_path.insert(0, Finder())
