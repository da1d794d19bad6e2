"""What PyTorch's own engines, DDP and FSDP2, have in common: autograd, clipping and a torch optimizer in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.checkpoint import Fragment
from harness.config import Config
from harness.engines import build_optimizer
from harness.measure.memory import HeldBytes, local_part
from harness.model import LossModel
from harness.ranks import World


class NativeEngine:
    """A model whose weights, gradients and optimizer state are torch tensors of this process.

    Weights are fp32 in every precision: they are what forward reads or gathers, so they count as parameters, and no
    second copy counts as optimizer state.

    Args:
        model: on this rank's device, wrapped or sharded; its parameters are what the optimizer updates.
        sharded: whether a rank's gradients are its share of them, so that their norm is a sum over the ranks.
    """

    skipped_steps = 0  # no loss scaling, so no update is left out

    def __init__(
        self, config: Config, world: World, model: nn.Module, settings: dict[str, Any], arithmetic: str, sharded: bool
    ):
        self.world = world
        self.module = model
        self.settings = settings
        self.arithmetic = arithmetic
        self.parameters = list(model.parameters())
        self.n_params = sum(p.numel() for p in self.parameters)
        self.optimizer = build_optimizer(config, self.parameters)
        self._held = HeldBytes(self.optimizer, self._held_tensors)
        self._sharded = sharded
        self._clip_norm = config.optimizer.clip_norm

    @property
    def loss_model(self) -> LossModel:
        """The model below any wrapper."""
        assert isinstance(self.module, LossModel)
        return self.module

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around one micro batch: gradients are exchanged only in the last."""
        raise NotImplementedError

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def computing(self) -> AbstractContextManager[Any]:
        """Around a forward pass: the precision it computes in."""
        return nullcontext()

    def forward_backward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, last: bool
    ) -> torch.Tensor:
        with self.accumulating(last):
            with self.computing():
                loss = self.module(input_ids, labels, targets)
            (loss * self.world.size).backward()  # gradients are averaged over ranks; shares are to be summed
        return loss.detach()

    def step(self, rate: float) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self._clip()
        self.optimizer.step()
        self.clear_gradients()
        self._held.updates += 1
        return norm

    def _clip(self) -> torch.Tensor:
        """Scale all gradients down to the norm allowed; the global norm before."""
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self._sharded:
            norm = norm**2
            dist.all_reduce(norm)
            norm = norm.sqrt()
        if self._clip_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.module.eval()
        with self.computing():
            loss = self.loss_model(input_ids, labels, targets)
        self.module.train()
        return loss

    def held_bytes(self) -> dict[str, int]:
        return self._held.bytes

    def _held_tensors(self) -> dict[str, list[torch.Tensor]]:
        states = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return {"param": [*self.parameters], "grad": gradients, "optimizer": states}

    @property
    def sharded(self) -> bool:
        return self._sharded

    def fragments(self) -> list[Fragment]:
        found = []
        for name, p in self.loss_model.model.named_parameters():
            start = 0
            if isinstance(p, DTensor):
                place: Any = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
                start = place[1][0] * math.prod(p.shape[1:])
            if length := local_part(p).numel():
                found.append(Fragment(name, start, length, p, 0))
        return found

    def refresh(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Forward reads the fp32 weights themselves."""

    def scalars(self) -> dict[str, float]:
        return {}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """None of its own."""

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).float().cpu().clone() for name, p in self.loss_model.model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all ranks, without gradient history; every rank must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
