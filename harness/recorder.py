"""From what happens in training to rows of metrics and a summary, without making training wait.

Losses and norms stay on the device and marks on its time line until a flush, which reduces them over the ranks in
two collectives, between updates.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.config import Config, ConfigError, grad_accum_steps, total_steps
from harness.engines import Engine
from harness.hf_config import model_shape
from harness.lr import scaled_rate
from harness.measure.memory import peak_memory_bytes
from harness.measure.steps import StepClock, rates
from harness.measure.traffic import TrafficCounter, ring_traffic_bytes
from harness.measure.utilisation import utilisation
from harness.ranks import Diverged, Watch, World
from harness.rundir import finite
from harness.server import Server
from harness.shape import ModelShape

if TYPE_CHECKING:
    from harness.checkpoint import Checkpoints
    from harness.train import Leader

KEPT = (
    "step_times", "data_waits", "first_loss", "last_row", "eval_loss", "eval_time_s", "checkpoint_time_s", "load_time_s",
)  # fmt: skip
EXPLODED = 2.0  # a flush whose mean loss exceeds this multiple of the first loss has diverged


class Recorder:
    """Collects one row per update on every rank; rank 0's leader writes and shows them.

    Args:
        leader: rank 0's, which writes and shows rows; None elsewhere.
    """

    def __init__(self, config: Config, world: World, leader: Leader | None, watch: Watch | None = None):
        assert config.batch.global_size is not None
        self.config = config
        self.world = world
        self.leader = leader
        self.watch = watch
        self.stop_requested = False  # the same on every rank
        self.clock = StepClock(world.device)
        self.batch_size = config.batch.global_size
        self.started = time.monotonic()
        self.pending: list[dict[str, Any]] = []
        self.step_times: list[float] = []
        self.data_waits: list[float] = []
        self.traffic = TrafficCounter()
        self.first_loss: float | None = None
        self.last_row: dict[str, Any] = {}
        self.eval_loss: float | None = None
        self.eval_time_s = 0.0
        self.checkpoint_time_s = 0.0
        self.load_time_s = 0.0

    def checkpoint(self, checkpoints: Checkpoints, step: int) -> None:
        """Write a checkpoint after update ``step``, whose time counts in no update."""
        started = time.monotonic()
        checkpoints.save(step, self.state())
        self.checkpoint_time_s += time.monotonic() - started

    def resume(self, checkpoints: Checkpoints, path: Path) -> int:
        """Go on from a checkpoint; the samples that are done."""
        started = time.monotonic()
        saved = checkpoints.load(path)
        seconds = time.monotonic() - started
        self.load_state(saved["recorder"])
        self.load_time_s += seconds
        return saved["samples"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, after a flush; JSON."""
        kept = {name: getattr(self, name) for name in KEPT}
        kept["last_row"] = {key: finite(value) for key, value in self.last_row.items()}
        return kept | {"wall_s": time.monotonic() - self.started}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        for name in KEPT:
            setattr(self, name, state[name])
        self.started = time.monotonic() - state["wall_s"]

    def start_update(self) -> None:
        self.data_wait = 0.0
        self.start = self.clock.mark()

    def data_ready(self, asked_at: float) -> None:
        self.data_wait += time.perf_counter() - asked_at

    def end_update(self, step: int, loss: torch.Tensor, grad_norm: Any, applied: dict[str, Any]) -> None:
        """Keep update ``step`` (from 0).

        Args:
            loss: this rank's share, a scalar on the device.
            applied: the server's columns, ``lr`` among them.
        """
        done = step + 1
        self.pending.append(
            {
                "step": done,
                "samples": done * self.batch_size,
                "tokens": done * self.batch_size * self.config.data.seq_len,
                "loss": loss,
                **applied,
                "grad_norm": grad_norm,
                "marks": (self.start, self.clock.mark()),
                "data_wait_s": self.data_wait,
                "wall_s": time.monotonic() - self.started,
            }
        )

    def evaluated(self, loss: torch.Tensor, seconds: float) -> None:
        """Put an evaluation's loss share into the row of the last update, and flush."""
        self.pending[-1]["eval_loss"] = loss
        self.eval_time_s += seconds
        self.flush()

    def flush(self) -> None:
        """Reduce, write and show the pending rows.

        Raises:
            Diverged: on every rank, when the loss or the gradient is not finite or the loss has exploded; the rows are
                written first. Under fp16 an infinite gradient is usual: its update is skipped and the loss scaled anew.
        """
        rows, self.pending = self.pending, []
        if not rows:
            return
        shares = [row["loss"] for row in rows] + [row["eval_loss"] for row in rows if "eval_loss" in row]
        sums = torch.stack(shares).double()
        dist.all_reduce(sums)
        times = [self.clock.seconds(*row.pop("marks")) for row in rows]
        told = float(self.watch is not None and self.watch.told is not None)
        slowest = self.world.max_over_ranks([*times, *(row["data_wait_s"] for row in rows), told])
        self.stop_requested = slowest.pop() > 0
        losses = sums.tolist()
        eval_losses = iter(losses[len(rows) :])
        for row, loss, step_time, data_wait in zip(rows, losses, slowest, slowest[len(rows) :], strict=False):
            row["loss"] = loss
            row["step_time_s"] = step_time
            row["tokens_per_s"] = self.batch_size * self.config.data.seq_len / step_time
            row["data_wait_s"] = data_wait
            row["grad_norm"] = None if row["grad_norm"] is None else float(row["grad_norm"])
            if "eval_loss" in row:
                row["eval_loss"] = self.eval_loss = next(eval_losses)
        self.step_times += slowest[: len(rows)]
        self.data_waits += slowest[len(rows) :]
        self.last_row = rows[-1]
        if self.first_loss is None:
            self.first_loss = losses[0]
        if self.leader is not None:
            self.leader.rows(rows)
        for row in rows:
            norm = None if self.config.precision == "fp16" else row["grad_norm"]
            for name, value in (("loss", row["loss"]), ("gradient norm", norm)):
                if value is not None and not math.isfinite(value):
                    raise Diverged(f"the {name} of update {row['step']} is {value}")
        mean = sum(losses[: len(rows)]) / len(rows)
        if mean > EXPLODED * self.first_loss:
            raise Diverged(
                f"the mean loss of updates {rows[0]['step']} to {rows[-1]['step']} is {mean:.3g}, "
                f"more than {EXPLODED:g} times the first, {self.first_loss:.3g}"
            )

    def summarise(self, engine: Engine, server: Server) -> dict[str, Any]:
        """The scalars of a run: numbers of the slowest or fullest rank, null where they do not apply.

        A collective: every rank must call it.
        """
        config, batch = self.config, self.config.batch
        held = engine.held_bytes()
        kinds = ("param", "grad", "optimizer")
        own = [peak_memory_bytes(), server.pending_gradient_bytes, *(held.get(kind, 0) for kind in kinds)]
        peak, pending, *most = (int(count) for count in self.world.max_over_ranks([float(count) for count in own]))
        state = {f"{kind}_bytes": count if held else None for kind, count in zip(kinds, most, strict=True)}
        counted = bool(self.traffic.bytes)
        speed = rates(self.step_times, self.batch_size, config.data.seq_len, self.world.size)
        return {
            "world_size": self.world.size,
            "zero_stage": config.zero.stage if config.engine.kind == "deepspeed" else None,
            "engine": config.engine.kind,
            "precision": config.precision,
            "arithmetic": engine.arithmetic,
            "global_batch_size": batch.global_size,
            "micro_batch_size": batch.micro_size,
            "grad_accum_steps": grad_accum_steps(batch),
            "lr": scaled_rate(config.lr, self.batch_size),
            "n_params": engine.n_params,
            "steps": total_steps(config),
            "samples": self.last_row["samples"],
            "tokens": self.last_row["tokens"],
            **speed,
            **utilisation(config, known_shape(config, engine), gpu_name(), speed["tokens_per_s_per_rank"]),
            "data_wait_share": sum(self.data_waits) / sum(self.step_times),
            "eval_time_s": self.eval_time_s,
            "checkpoint_time_s": self.checkpoint_time_s,
            "load_time_s": self.load_time_s,
            "wall_s": time.monotonic() - self.started,
            "peak_memory_bytes": peak,
            **state,
            "pending_gradient_bytes": pending if server.delayed is not None else None,
            "comm_bytes_per_step": dict(self.traffic.bytes) if counted else None,
            "comm_calls_per_step": dict(self.traffic.calls) if counted else None,
            "comm_traffic_bytes": ring_traffic_bytes(self.traffic.bytes, self.world.size) if counted else None,
            "first_loss": self.first_loss,
            "final_loss": self.last_row["loss"],
            "eval_loss": self.eval_loss,
            "skipped_steps": engine.skipped_steps,
            **server.summary(),
        }


def known_shape(config: Config, engine: Engine) -> ModelShape | None:
    """The sizes of a run's model; None if they do not explain how many parameters it has."""
    try:
        shape = model_shape(config.model)
    except ConfigError:
        return None
    return shape if shape.params == engine.n_params else None


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
