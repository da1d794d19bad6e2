"""Engines: who holds the weights, exchanges the gradients and applies the updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from harness.checkpoint import Fragment
    from harness.config import Config
    from harness.ranks import World


class Engine(Protocol):
    """One rank's side of data-parallel training. All losses are shares: they sum to the global mean loss."""

    n_params: int
    optimizer: torch.optim.Optimizer  # under parallel=async a DelayedOptimizer
    settings: dict[str, Any]  # what the library behind it was given, for the record
    arithmetic: str  # what weights are kept in and forward computes in

    def forward_backward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, last: bool
    ) -> torch.Tensor:
        """Accumulate the gradients of one micro batch; its detached loss share, on the device.

        Args:
            targets: predicted tokens of the global batch, a scalar tensor.
            last: whether this is the update's last micro batch.
        """

    def step(self, rate: float) -> torch.Tensor | float | None:
        """Apply the accumulated gradients at a learning rate; their global norm before clipping, if known."""

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss share of one micro batch of the evaluation, without gradients."""

    @property
    def skipped_steps(self) -> int:
        """Updates left out because the gradients were not finite."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes this rank held just before its second update: ``param``, ``grad``, ``optimizer``."""

    @property
    def sharded(self) -> bool:
        """Whether the ranks own different fragments; else each owns all."""

    def fragments(self) -> list[Fragment]:
        """What this rank's optimizer updates, as stretches of the model's parameters."""

    def refresh(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Make what forward reads follow from new fp32 weights.

        Args:
            read: elements of a flattened parameter, by name, first element and count.
        """

    def scalars(self) -> dict[str, float]:
        """Counters and scales that belong to the state of training."""

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Put back what :meth:`scalars` gave."""

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter whole, fp32 on the CPU, by name: gathered, so all ranks must call it."""


def build_engine(config: Config, world: World) -> Engine:
    """The engine of a resolved config, with the model in it."""
    if config.engine.kind == "ddp":
        from harness.engines.ddp import DDPEngine

        return DDPEngine(config, world)
    if config.engine.kind == "fsdp":
        from harness.engines.fsdp import FSDPEngine

        return FSDPEngine(config, world)
    from harness.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, world)


def build_optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer, fused on GPU, behind a DelayedOptimizer under ``parallel=async``.

    The rate is set before every step.
    """
    from harness.server import hold_back

    return hold_back(build_torch_optimizer(config, parameters), config)


def build_torch_optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    from harness.config import AdamWConfig, SGDConfig

    settings = config.optimizer
    fused = {"fused": True} if torch.cuda.is_available() and not config.zero.offload_optimizer else {}
    if isinstance(settings, AdamWConfig):
        betas = (settings.betas[0], settings.betas[1])
        return torch.optim.AdamW(
            parameters, lr=0.0, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay, **fused
        )
    assert isinstance(settings, SGDConfig)
    return torch.optim.SGD(parameters, lr=0.0, momentum=settings.momentum, weight_decay=settings.weight_decay, **fused)
