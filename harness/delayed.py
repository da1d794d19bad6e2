"""Asynchronous gradients under any engine: an optimizer that applies pending gradients instead of fresh ones.

Handed to ``deepspeed.initialize`` as the client optimizer it sees, in ZeRO stages 0 to 3, the final averaged and
clipped gradients of the tensors that the engine updates, whole or sharded; what it holds back is sharded alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.config import AsyncConfig, ConfigError
from harness.measure.memory import local_part
from harness.staleness import Arrival, Schedule, WeightUpdate, expected_pending_bytes, rate_factor

DC_EPSILON = 1e-7  # under the root of DC-ASGD's mean square, as in Microsoft Multiverso


@dataclass
class Pending:
    """What is held for one tensor of the optimizer.

    Attributes:
        gradients: by gradient index; None for one that left the tensor out.
        weights: as their workers pulled them, by gradient index; only under DC-ASGD.
        group: sum of the gradients of an incomplete weight update, on the tensor's device.
        mean_square: running mean of squared gradients, of adaptive DC-ASGD.
        spare: buffers to be used again.
    """

    device: torch.device
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    group: Tensor | None = None
    mean_square: Tensor | None = None
    spare: list[Tensor] = field(default_factory=list)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the pending device, in a spare buffer if there is one."""
        if self.spare:
            buffer = self.spare.pop()
        else:
            pinned = tensor.is_cuda and self.device.type == "cpu"
            buffer = torch.empty_like(tensor, device=self.device, requires_grad=False, pin_memory=pinned)
        return buffer.copy_(tensor, non_blocking=True)

    def fetch(self, buffer: Tensor, device: torch.device) -> Tensor:
        """A kept tensor on `device`, without a copy where it lies there already."""
        if buffer.device == device:
            return buffer
        fetched = buffer.to(device, non_blocking=True)
        self.spare.append(buffer)  # written again only by a later copy on the same stream
        return fetched

    def release(self, tensor: Tensor) -> None:
        """Done with a fetched tensor."""
        if tensor.device == self.device:
            self.spare.append(tensor)

    @property
    def nbytes(self) -> int:
        """Of all buffers, spare ones too."""
        tensors = [*self.gradients.values(), *self.weights.values(), *self.spare, self.group, self.mean_square]
        return sum(local_part(tensor).nbytes for tensor in tensors if tensor is not None)

    def clear(self) -> None:
        self.gradients.clear()
        self.weights.clear()
        self.spare.clear()
        self.group = None


class DelayedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer so that `step` applies the gradients that a schedule says have arrived.

    Before every engine update call :meth:`begin_update`, then let the engine call `step`: once, or once per
    parameter group or sub-group as ZeRO does, each tensor at most once. Steps before the first ``begin_update`` are
    the inner optimizer's own, since DeepSpeed warms up some optimizers with zero gradients. Parameter groups, state
    and hooks are the inner optimizer's; its hooks fire at each weight update.

    Args:
        rate: the learning rate of a weight update; None: whatever the parameter groups say at `step`. Remedies
            scale it for that update only.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        settings: AsyncConfig,
        rate: Callable[[WeightUpdate], float] | None = None,
    ):
        self.inner = inner
        self.schedule = schedule
        self.settings = settings
        self.rate = rate
        default_lambda = 2.0 if settings.dc_adaptive else 0.04  # Zheng 2016, arXiv:1609.08326, section 6.1
        self._dc_lambda = default_lambda if settings.dc_lambda is None else settings.dc_lambda
        self._pending: dict[Tensor, Pending] = {}
        self._arrivals: tuple[Arrival, ...] | None = None
        self._last = False
        self._drained_bytes = 0  # held when the last update began
        self._stepped: set[Tensor] = set()
        self._before: dict[str, Any] | None = None  # the schedule as it was before an update not yet stepped

    def begin_update(self, last: bool = False) -> tuple[Arrival, ...]:
        """Fix what the coming engine update applies; the arrivals.

        If the engine never stepped since the previous call (it skips gradients that are not finite), that call is
        undone: the same worker computes anew at the same weights.

        Args:
            last: this engine update is the run's last; the pending gradients are drained in it.
        """
        self._undo_skipped()
        self._before = self.schedule.state_dict()
        self._arrivals = self.schedule.advance(last)
        self._last = last
        self._stepped.clear()
        return self._arrivals

    def end_update(self) -> tuple[Arrival, ...]:
        """What the engine update has applied; nothing if the engine skipped it, which is then undone."""
        return () if self._undo_skipped() else self._arrivals or ()

    def _undo_skipped(self) -> bool:
        if self._before is None:
            return False
        self.schedule.load_state_dict(self._before)
        self._before = None
        return True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the arrivals to the tensors now in ``param_groups`` and hold back their fresh gradients.

        Raises:
            RuntimeError: for a tensor that was stepped since ``begin_update``.
        """
        assert closure is None, "the gradients are computed before the step"
        if self._arrivals is None:
            self.inner.step()
            return
        params = [p for group in self.param_groups for p in group["params"]]
        if not self._stepped.isdisjoint(params):
            raise RuntimeError("a tensor is stepped twice in one update: call begin_update() before every engine step")
        self._stepped.update(params)
        self._before = None
        fresh = {p: p.grad for p in params}
        current = self.schedule.tally.computed - 1
        arriving = {arrival.gradient: arrival.staleness for arrival in self._arrivals}
        stays = current not in arriving and not self._last
        if self.settings.remedy == "dc_asgd" and (stays or arriving.get(current, 0) > 0):
            for p in params:
                held = self._held(p)
                held.weights[current] = held.keep(p)
        for arrival in self._arrivals:
            for p in params:
                p.grad = self._receive(p, arrival, fresh[p] if arrival.gradient == current else None, current)
            if arrival.update is not None:
                with self._rate_of(arrival.update):
                    self.inner.step()
                for p in params:
                    if p.grad is not None and p.grad is not fresh[p]:
                        self._held(p).release(p.grad)
        for p, gradient in fresh.items():
            p.grad = gradient
            held = self._held(p)
            if self._last:
                self._drained_bytes += held.nbytes
                held.clear()
            elif stays:
                held.gradients[current] = None if gradient is None else held.keep(gradient)

    def _held(self, p: Tensor) -> Pending:
        if p not in self._pending:
            device = p.device if self.settings.pending_device == "same" else torch.device("cpu")
            self._pending[p] = Pending(device)
        return self._pending[p]

    def _receive(self, p: Tensor, arrival: Arrival, fresh: Tensor | None, current: int) -> Tensor | None:
        """The gradient to apply to `p` now, or None while its group is incomplete or left `p` out."""
        held = self._held(p)
        gradient = fresh
        if arrival.gradient != current:
            buffer = held.gradients.pop(arrival.gradient)
            gradient = None if buffer is None else held.fetch(buffer, p.device)
        if self.settings.remedy == "dc_asgd":
            self._compensate(p, held, arrival.gradient, gradient)
        update = arrival.update
        if update is not None and len(update.staleness) == 1:
            return gradient
        if gradient is not None:
            if held.group is not None:
                held.group.add_(gradient)
                if gradient is not fresh:
                    held.release(gradient)
            elif gradient is not fresh:
                held.group = gradient
            else:
                held.group = held.keep(gradient) if p.device == held.device else gradient.clone()
        if update is None or held.group is None:
            return None
        mean, held.group = held.group.div_(len(update.staleness)), None
        return mean

    def _compensate(self, p: Tensor, held: Pending, index: int, gradient: Tensor | None) -> None:
        """Delay compensation in place: g + lambda g g (w_now - w_pulled); Zheng 2016, arXiv:1609.08326, eq. 10.

        Adaptive: lambda / sqrt(mean square of g + 1e-7) for each element, as in Microsoft Multiverso.
        """
        stale = held.weights.pop(index, None)
        drift = None if stale is None else held.fetch(stale, p.device)
        if gradient is not None and self.settings.dc_adaptive:
            if held.mean_square is None:
                held.mean_square = torch.zeros_like(gradient)
            decay = self.settings.dc_decay
            held.mean_square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
        if drift is None:
            return
        if gradient is not None:
            drift.neg_().add_(p).mul_(gradient).mul_(gradient)
            if held.mean_square is not None:
                drift.div_((held.mean_square + DC_EPSILON).sqrt_())
            gradient.add_(drift, alpha=self._dc_lambda)
        held.release(drift)

    @contextmanager
    def _rate_of(self, update: WeightUpdate) -> Iterator[None]:
        factor = rate_factor(update, self.settings.remedy, self.settings.lr_mode)
        groups = list(self.param_groups)
        if self.rate is not None:
            for group in groups:
                group["lr"] = self.rate(update)
        scheduled = [group["lr"] for group in groups]
        if factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor
        yield
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate

    @property
    def pending_gradient_bytes(self) -> int:
        """Bytes this rank holds for pending gradients, and under DC-ASGD for weight copies; spare buffers count."""
        return sum(held.nbytes for held in self._pending.values())

    @property
    def most_pending_bytes(self) -> int:
        """The most of :attr:`pending_gradient_bytes` there ever was, also after the pending gradients were drained."""
        return max(self._drained_bytes, self.pending_gradient_bytes)

    def pending_tensors(self, p: Tensor) -> dict[str, Tensor]:
        """Everything held for one tensor, by kind: ``gradients/K``, ``weights/K``, ``group``, ``mean_square``."""
        held = self._pending.get(p)
        if held is None:
            return {}
        if held.device.type == "cpu" and p.is_cuda:
            torch.cuda.synchronize()  # copies to the host may be under way
        kept = {f"gradients/{k}": g for k, g in held.gradients.items() if g is not None}
        kept |= {f"weights/{k}": w for k, w in held.weights.items()}
        return kept | {k: t for k in ("group", "mean_square") if (t := getattr(held, k)) is not None}

    def pending_tensor(self, p: Tensor, kind: str) -> Tensor:
        """The tensor of a kind of :meth:`pending_tensors`, made if there is none; to be filled from a checkpoint."""
        held = self._held(p)
        place, _, index = kind.partition("/")
        if index:
            tensors = getattr(held, place)
            if int(index) not in tensors:
                tensors[int(index)] = held.keep(torch.zeros_like(p, requires_grad=False))
            return tensors[int(index)]
        if getattr(held, place) is None:
            setattr(held, place, torch.zeros_like(p, requires_grad=False))
        return getattr(held, place)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's, and under ``delayed`` the schedule and what is pending, by parameter index."""
        if any(held.device.type == "cpu" and p.is_cuda for p, held in self._pending.items()):
            torch.cuda.synchronize()  # copies to the host may be under way
        schedule = self.schedule.state_dict() if self._before is None else self._before
        pending = {}
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p in self._pending:
                held = self._pending[p]
                pending[index] = {
                    "gradients": dict(held.gradients),
                    "weights": dict(held.weights),
                    "group": held.group,
                    "mean_square": held.mean_square,
                }
        return {**self.inner.state_dict(), "delayed": {"schedule": schedule, "pending": pending}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was taken; without ``delayed`` in it, all workers start anew at these weights."""
        inner = dict(state_dict)
        delayed = inner.pop("delayed", None)
        self.inner.load_state_dict(inner)
        self._pending.clear()
        self._stepped.clear()
        self._arrivals = self._before = None
        if delayed is None:
            return
        self.schedule.load_state_dict(delayed["schedule"])
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            saved = delayed["pending"].get(index)
            if saved is None:
                continue
            held = self._held(p)
            held.gradients = {k: None if g is None else held.keep(g) for k, g in saved["gradients"].items()}
            held.weights = {k: held.keep(w) for k, w in saved["weights"].items()}
            for name in ("group", "mean_square"):
                if saved[name] is not None:
                    setattr(held, name, saved[name].to(p.device, copy=True))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults


def check_pending_memory(settings: AsyncConfig, shard_elements: int, free_bytes: int) -> None:
    """Refuse what cannot be held back.

    Args:
        shard_elements: of the parameters, as this rank updates them in fp32.
        free_bytes: on the device that is to hold them, beside everything else.

    Raises:
        ConfigError: naming the bytes needed and the way out.
    """
    expected = expected_pending_bytes(settings, shard_elements)
    needed = sum(expected.values())
    if needed <= free_bytes:
        return
    copies = f", {expected['weights'] / 2**30:.2f} of them for DC-ASGD's weight copies" if expected["weights"] else ""
    ways = ["fewer workers", "a higher zero.stage"]
    if settings.pending_device == "same":
        ways.append("parallel.pending_device=cpu")
    raise ConfigError(
        f"parallel.workers={settings.workers}: pending gradients need {needed / 2**30:.2f} GiB per rank{copies}; "
        f"{free_bytes / 2**30:.2f} GiB are free; use {' or '.join(ways)}"
    )
