"""Engines: who holds the weights, exchanges the gradients and applies the updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from harness.config import Config
    from harness.ranks import World


class Engine(Protocol):
    """One rank's side of data-parallel training. All losses are shares: they sum to the global mean loss."""

    n_params: int
    settings: dict[str, Any]  # what the library behind it was given, for the record

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

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter whole, fp32 on the CPU, by name: gathered, so all ranks must call it."""


def build_engine(config: Config, world: World) -> Engine:
    """The engine of a resolved config, with the model in it."""
    from harness.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, world)


def build_optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer, fused on GPU. The rate is set before every step."""
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
