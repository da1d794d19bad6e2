"""What this process was started as: a rank or not, with which devices. Imports no torch where none is needed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

# What a launcher sets for a rank; a world that a rank or a batch script starts must not inherit it.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
    "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS",
    "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "WANDB_RUN_ID",
)  # fmt: skip
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what tells a run to end
LAUNCHERS = ("deepspeed.launcher.launch", "torchrun", "torch.distributed.run", "torch/distributed/run")
RUNNERS = ("bin/deepspeed", "deepspeed.launcher.runner", "bin/ds ")


def set_rank_environment() -> bool:
    """Whether this process is a rank; fills in what a launcher other than DeepSpeed's leaves out.

    ``deepspeed`` and ``torchrun`` set RANK and WORLD_SIZE. ``srun`` sets Slurm's variables; a batch script has some
    of them too, but is no step of several tasks.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        env.setdefault("LOCAL_RANK", env["RANK"])
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "29500")
        return True
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = (
            env[key] for key in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        )
        if "MASTER_ADDR" not in env:
            command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
            hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            env["MASTER_ADDR"] = hosts[0] if len(hosts) > 1 else "127.0.0.1"
        step = int(env["SLURM_JOB_ID"]) * 97 + int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(20_000 + step % 10_000))
        return True
    return False


def place_in_job() -> dict[str, str] | None:
    """What a launcher would tell this process, one of several tasks that submitit has started for one job of a sweep;
    None for a process that is alone."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return None
    from submitit.helpers import TorchDistributedEnvironment

    task = TorchDistributedEnvironment()
    if task.world_size == 1:
        return None
    values = {
        "RANK": task.rank, "LOCAL_RANK": task.local_rank, "WORLD_SIZE": task.world_size,
        "LOCAL_SIZE": task.local_world_size, "MASTER_ADDR": task.master_addr, "MASTER_PORT": task.master_port,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()}


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For imports: what they make stays, and to look through it for garbage takes a fifth of a rank's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def ranks_on_host() -> int:
    """Ranks that this rank's launcher started on this machine."""
    for key in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        if key in os.environ:
            return int(os.environ[key])
    return int(os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ["WORLD_SIZE"]).split("(")[0].split(",")[0])


def cache_folder() -> Path:
    """What this program keeps on a machine from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness"


def visible_gpus() -> int:
    """GPUs that torch would see here."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def without_local_rank(arguments: list[str]) -> list[str]:
    """Arguments without the ``--local_rank=N`` that launchers inject and Hydra refuses."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--local_rank", "--local-rank"):
            skip = True
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    return kept


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for want of memory; 0 where it does not say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as file:
                counts = dict(line.split() for line in file)
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0


def cgroup_free_bytes() -> int | None:
    """Bytes of memory below the limit of this control group; None without a limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as limit_file, open(used) as used_file:
                return max(0, int(limit_file.read()) - int(used_file.read()))
        except (OSError, ValueError):  # a group without a limit says `max`
            continue
    return None


def launchers() -> list[psutil.Process | None]:
    """The launcher processes above this rank whose end means that nobody waits for it any more.

    To be asked first of all, since a launcher that ends later can no longer be found. None stands for one that is
    already gone.
    """
    found: list[psutil.Process | None] = []
    parent = psutil.Process().parent()
    if parent is not None and any(name in command_line(parent) for name in LAUNCHERS):
        found.append(parent)
        above = parent.parent()
        if "deepspeed.launcher.launch" in command_line(parent):
            if above is not None and any(name in command_line(above) for name in RUNNERS):
                found.append(above)
            elif above is None or above.pid == 1:
                found.append(None)
    return found


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def process_of(pid: int, started: float) -> psutil.Process | None:
    """The process with this pid if it is the one that started then."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - started) < 1 else None
    except psutil.NoSuchProcess:
        return None


def alive(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
