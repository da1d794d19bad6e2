"""One run on one rank: build, train, evaluate now and then, finish."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from harness.calibration import machine_here
from harness.config import Config, load, total_steps
from harness.data import Data, open_data
from harness.display import Display, print_outcome
from harness.engines import Engine, build_engine
from harness.hf_config import check_limits
from harness.lr import rate_at
from harness.measure.hardware import describe_environment
from harness.ranks import Watch, World, fix_threads, leave
from harness.recorder import Recorder, gpu_name, known_shape
from harness.residual import predicted_numbers, residuals
from harness.rundir import RunDir, Status, write_json
from harness.screen import Screen
from harness.tracking import Tracker

COUNTED_STEP = 2  # the update whose collectives are counted, from 0; stage 3 learns the order of modules before
FINISH_S = 20.0  # the longest W&B may take to close a run that did not complete


def run(config_text: str, path: Path, world: World, screen: Screen) -> NoReturn:
    """Train one run on this rank and leave the process, with whatever status it came to."""
    config = load(config_text)
    leader = Leader(config, RunDir(path), screen) if world.rank == 0 else None
    screen.log_to(path / "logs" / f"rank{world.rank}.log")
    watch = Watch(world, leader.end if leader else None, config.launch.timeout_s)
    try:
        fix_threads()
        data = open_data(config, check_limits(config))
        world.init_process_group()
        engine = build_engine(config, world)
        if leader:
            leader.start(engine, data)
        recorder = Recorder(config, world, leader)
        train(config, world, data, engine, recorder)
        summary = recorder.summarise(engine)
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

    def __init__(self, config: Config, run_dir: RunDir, screen: Screen):
        self.config = config
        self.run_dir = run_dir
        self.screen = screen
        self.tracker: Tracker | None = None
        self.display = Display(screen.err, total_steps(config), run_dir.path.name)
        run_dir.write_status("running")
        # W&B takes a second or two to start, mostly waiting: that goes on while the engine is built.
        self._starting_tracker = None
        if config.wandb.mode != "disabled":
            self._starting_tracker = ThreadPoolExecutor(1).submit(Tracker, config, run_dir)

    def start(self, engine: Engine, data: Data) -> None:
        """Record what the run is, once everything is built."""
        write_json(self.run_dir.path / "ds_config.json", engine.settings)
        environment = describe_environment(data.corpus.fingerprint)
        write_json(self.run_dir.path / "env.json", environment)
        if self._starting_tracker is not None:
            self.tracker = self._starting_tracker.result()
            self.tracker.add_config({"derived": {"n_params": engine.n_params}, "env": environment})

    def rows(self, rows: list[dict]) -> None:
        """Write and show rows of metrics."""
        self.run_dir.append_metrics(rows)
        self.display.update(rows[-1])
        if self.tracker:
            self.tracker.log(rows)

    def complete(self, summary: dict) -> None:
        """Record a run that did all its updates."""
        self.display.close()
        wandb_dir = self.tracker.offline_dir if self.tracker else None
        self.run_dir.write_summary({**summary, "wandb_dir": wandb_dir})
        if self.tracker:
            self.tracker.finish(summary, "completed")
        self.run_dir.write_status("completed")
        self._print_outcome()

    def end(self, status: Status, reason: str) -> None:
        """Record a run that ends otherwise; called by the watch thread."""
        self.run_dir.write_status(status, reason)
        self.display.close()
        if self.tracker:
            closing = threading.Thread(target=self.tracker.finish, args=(None, status, reason), daemon=True)
            closing.start()
            closing.join(FINISH_S)
        self._print_outcome()

    def _print_outcome(self) -> None:
        status = self.run_dir.read_status() or {}
        print_outcome(self.screen.out, str(self.run_dir.path), status, self.run_dir.read_summary())


def train(config: Config, world: World, data: Data, engine: Engine, recorder: Recorder) -> None:
    """Every update of a run: micro batches, forward and backward, one step, now and then an evaluation or a flush."""
    batch, steps = config.batch, total_steps(config)
    assert batch.global_size is not None and batch.micro_size is not None
    for step in range(steps):
        with recorder.traffic if step == min(COUNTED_STEP, max(1, steps - 1)) else nullcontext():
            recorder.start_update()
            targets, batches = data.update_batches(step, batch.global_size, batch.micro_size, world.rank, world.size)
            targets_on_device = torch.tensor(float(targets), device=world.device)
            loss = torch.zeros((), device=world.device)
            remaining = batch.global_size // world.size // batch.micro_size
            asked_at = time.perf_counter()
            for input_ids, labels in batches:
                input_ids, labels = (t.to(world.device, non_blocking=True) for t in (input_ids, labels))
                recorder.data_ready(asked_at)
                remaining -= 1
                loss += engine.forward_backward(input_ids, labels, targets_on_device, last=remaining == 0)
                asked_at = time.perf_counter()
            rate = rate_at(config.lr, step * batch.global_size, batch.global_size, steps * batch.global_size)
            norm = engine.step(rate)
            recorder.end_update(step, loss, norm, rate)
        if evaluation_due(config, step, steps):
            recorder.evaluated(*evaluate(config, world, data, engine))
        elif step == 0 or (step + 1) % config.train.log_every == 0 or step + 1 == steps:
            recorder.flush()


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
