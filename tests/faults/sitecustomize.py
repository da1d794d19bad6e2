"""Injects a fault into one rank of a real world: put this folder on PYTHONPATH and set FAULTS.

FAULTS is JSON: {"part of a run's name": [rank, update, kind]}, kinds as in FAULT_KINDS. Nothing of the harness knows.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time


def raise_error():
    raise RuntimeError("injected")


def run_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("injected: tried to allocate 1000 GiB")


FAULT_KINDS = {
    "raise": raise_error,
    "oom": run_out_of_memory,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill launcher": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(3600)),
    "hang": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def inject(module):
    """Wrap the end of every update of harness.recorder."""
    end_update = module.Recorder.end_update

    def wrapped(recorder, step, *arguments, **keywords):
        run_dir = next((part for part in sys.argv if part.startswith("--run-dir=")), "")
        for name, (rank, update, kind) in json.loads(os.environ["FAULTS"]).items():
            if name in run_dir and recorder.world.rank == rank and step + 1 == update:
                FAULT_KINDS[kind]()
        return end_update(recorder, step, *arguments, **keywords)

    module.Recorder.end_update = wrapped


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "harness.recorder":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            inject(module)

        spec.loader.exec_module = exec_module
        return spec


if "FAULTS" in os.environ and "RANK" in os.environ:
    import importlib.util

    sys.meta_path.insert(0, Finder())
