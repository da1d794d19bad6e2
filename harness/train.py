"""One run on one rank: build, train, evaluate now and then, finish."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from harness.calibration import machine_here
from harness.checkpoint import Checkpoints
from harness.checkpoint_folder import find_checkpoints
from harness.config import Config, grad_accum_steps, load, one_line, total_steps
from harness.data import Data, open_data
from harness.display import Display, print_outcome
from harness.engines import Engine, build_engine
from harness.feed import Feed
from harness.hf_config import check_limits
from harness.measure.hardware import describe_environment
from harness.ranks import ToldToStop, Watch, World, fix_threads, keep_freed_memory, leave
from harness.recorder import Recorder, gpu_name, known_shape
from harness.residual import predicted_numbers, residuals
from harness.rundir import RunDir, Status, write_json
from harness.screen import Screen, Unseen
from harness.server import Server
from harness.tracking import Tracker

COUNTED_STEP = 2  # the update whose collectives are counted, from 0; stage 3 learns the order of modules before
WANDB_S = 60.0  # the longest W&B may take to start
FINISH_S = 20.0  # the longest W&B may take to close a run that did not complete


def run(config_text: str, path: Path, resume: Path | None, world: World, screen: Screen | Unseen) -> NoReturn:
    """Train one run on this rank and leave the process, with whatever status it came to.

    Args:
        path: the run directory.
        resume: the checkpoint to go on from.
    """
    config = load(config_text)
    screen.log_to(path / "logs" / f"rank{world.rank}.log")
    leader = Leader(config, RunDir(path), screen) if world.rank == 0 else None
    watch = Watch(world, leader.end if leader else None, config.launch.timeout_s)
    try:
        fix_threads()
        keep_freed_memory()
        data = open_data(config, check_limits(config))
        world.init_process_group()
        engine = build_engine(config, world)
        if leader:
            leader.start(engine, data)
        server = Server(config, world, engine)
        recorder = Recorder(config, world, leader, watch)
        checkpoints = Checkpoints(config, world, engine, server, data.corpus.fingerprint, path)
        first = 0
        if resume is not None:
            first = recorder.resume(checkpoints, resume) // (config.batch.global_size or 1)
        if leader:
            leader.begin_at(first, resume)
        watch.can_stop_later = config.train.checkpoint_every is not None
        train(config, world, data, engine, server, recorder, checkpoints, first)
        summary = recorder.summarise(engine, server)
        if leader:
            leader.complete(summary | compare(config, engine, summary))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        watch.fail(error)
    leave(0)


def compare(config: Config, engine: Engine, summary: dict) -> dict:
    """What was predicted for a run, and by how much it was missed."""
    shape = known_shape(config, engine)
    if shape is None:
        return {"predicted": None, "residual": None}
    gpu = gpu_name()
    machine = machine_here(config.plan, config.precision, gpu, config.launch.world_size)
    predicted = predicted_numbers(config, shape, machine, on_gpu=gpu is not None)
    return {"predicted": predicted, "residual": residuals(summary, predicted)}


class Leader:
    """What rank 0 does for its world: the run directory, W&B and the screen. No other rank touches them."""

    def __init__(self, config: Config, run_dir: RunDir, screen: Screen | Unseen):
        self.config = config
        self.run_dir = run_dir
        self.screen = screen
        self.tracker: Tracker | None = None
        self.display = Display(screen.err, total_steps(config), run_dir.path.name)
        self._recording, self._ended = threading.Lock(), False  # the watch thread may record an end meanwhile
        run_dir.write_status("running")
        # W&B takes a second or two to start, mostly waiting: that goes on while the engine is built.
        self._starting_tracker = None
        if config.wandb.mode != "disabled":
            self._starting_tracker = ThreadPoolExecutor(1).submit(Tracker, config, run_dir)

    def start(self, engine: Engine, data: Data) -> None:
        """Record what the run is, once everything is built."""
        name = "ds_config.json" if self.config.engine.kind == "deepspeed" else "engine.json"
        write_json(self.run_dir.path / name, engine.settings)
        environment = describe_environment(data.corpus.fingerprint)
        write_json(self.run_dir.path / "env.json", environment)
        if self._starting_tracker is not None:
            try:
                self.tracker = self._starting_tracker.result(WANDB_S)
            except Exception as error:
                self._lose_wandb(error)
        self._tell_wandb(lambda t: t.add_config({"derived": {"n_params": engine.n_params}, "env": environment}))

    def _tell_wandb(self, tell: Callable[[Tracker], None]) -> None:
        """W&B keeps a copy of what is on disk: trouble with it is said and recorded, and costs the run nothing."""
        if self.tracker is not None:
            try:
                tell(self.tracker)
            except Exception as error:
                self._lose_wandb(error)

    def _lose_wandb(self, error: Exception) -> None:
        traceback.print_exception(error)
        self.tracker = self._starting_tracker = None
        reason = one_line(error)
        with self._recording:
            if not self._ended:
                self.run_dir.write_status("running", wandb_lost=reason)
        self.display.say(f"W&B is lost ({reason}); the run goes on, its record is on disk")

    def begin_at(self, step: int, resume: Path | None) -> None:
        """Say where a run goes on from; what it recorded after that is forgotten."""
        self.run_dir.cut_metrics(step)
        if resume is not None:
            self.display.say(f"goes on after update {step} from {resume}")
            self.run_dir.write_status("running", resumed_from=str(resume))

    def rows(self, rows: list[dict]) -> None:
        """Write and show rows of metrics."""
        self.run_dir.append_metrics(rows)
        self.display.update(rows[-1])
        self._tell_wandb(lambda tracker: tracker.log(rows))

    def complete(self, summary: dict) -> None:
        """Record a run that did all its updates."""
        self.display.close()
        wandb_dir = self.tracker.offline_dir if self.tracker else None
        self.run_dir.write_summary({**summary, "wandb_dir": wandb_dir})
        self._tell_wandb(lambda tracker: tracker.finish(summary, "completed"))
        self.run_dir.write_status("completed")
        self._print_outcome()

    def end(self, status: Status, reason: str) -> None:
        """Record a run that ends otherwise; called by the watch thread. A completed record is left as it is."""
        if (self.run_dir.read_status() or {}).get("status") == "completed":
            return
        resumable = bool(find_checkpoints(self.run_dir.path / "checkpoints"))
        with self._recording:
            self._ended = True
            self.run_dir.write_status(status, reason, resumable=resumable)
        self.display.close()
        if self._starting_tracker is not None:
            closing = threading.Thread(target=self._close_tracker, args=(status, reason), daemon=True)
            closing.start()
            closing.join(FINISH_S)
        self._print_outcome()

    def _close_tracker(self, status: Status, reason: str) -> None:
        assert self._starting_tracker is not None
        try:
            self._starting_tracker.result().finish(None, status, reason)
        except Exception as error:  # who ends a whole process group ends W&B's process as well
            traceback.print_exception(error)
            with self._recording:
                self.run_dir.write_status(status, reason, wandb_lost=one_line(error))

    def _print_outcome(self) -> None:
        status = self.run_dir.read_status() or {}
        print_outcome(self.screen.out, str(self.run_dir.path), status, self.run_dir.read_summary())


def train(
    config: Config,
    world: World,
    data: Data,
    engine: Engine,
    server: Server,
    recorder: Recorder,
    checkpoints: Checkpoints,
    first: int,
) -> None:
    """Every update of a run from ``first``: micro batches, forward and backward, one step; now and then an evaluation,
    a flush or a checkpoint.

    Raises:
        ToldToStop: on every rank, after a checkpoint, when one of them was told to.
    """
    batch, steps = config.batch, total_steps(config)
    assert batch.global_size is not None
    feed = Feed(config, world, data, first)
    counted = min(first + COUNTED_STEP, max(first + 1, steps - 1))
    for step in range(first, steps):
        with recorder.traffic if step == counted else nullcontext():
            recorder.start_update()
            asked_at = time.perf_counter()
            targets, batches = feed.update(step)
            loss = torch.zeros((), device=world.device)
            remaining = grad_accum_steps(batch)
            for input_ids, labels in batches:
                recorder.data_ready(asked_at)
                remaining -= 1
                loss += engine.forward_backward(input_ids, labels, targets, last=remaining == 0)
                asked_at = time.perf_counter()
            rate = server.begin_update(last=step + 1 == steps)
            norm = engine.step(rate)
            recorder.end_update(step, loss, norm, server.end_update())
        if evaluation_due(config, step, steps):
            recorder.evaluated(*evaluate(config, world, data, engine))
        elif step in (first, steps - 1) or (step + 1) % config.train.log_every == 0 or checkpoints.due(step, steps):
            recorder.flush()
        if checkpoints.due(step, steps) or recorder.stop_requested:
            recorder.checkpoint(checkpoints, step)
        if recorder.stop_requested and step + 1 < steps:
            raise ToldToStop((recorder.watch and recorder.watch.told) or "another rank was told to stop")


def evaluation_due(config: Config, step: int, steps: int) -> bool:
    """After the last update, and after each update that passes a multiple of ``train.eval_every`` samples."""
    if config.data.eval_samples == 0:
        return False
    if step + 1 == steps:
        return True
    every, size = config.train.eval_every, config.batch.global_size or 1
    return every is not None and (step + 1) * size // every > step * size // every


def evaluate(config: Config, world: World, data: Data, engine: Engine) -> tuple[torch.Tensor, float]:
    """This rank's share of the mean loss over the held-out slice, on the device, and the seconds it took."""
    assert config.batch.micro_size is not None
    started = time.monotonic()
    targets, batches = data.eval_batches(config.batch.micro_size, world.rank, world.size)
    targets_on_device = torch.tensor(float(targets), device=world.device)
    loss = torch.zeros((), device=world.device)
    for input_ids, labels in batches:
        loss += engine.evaluate(input_ids.to(world.device), labels.to(world.device), targets_on_device)
    return loss, time.monotonic() - started
