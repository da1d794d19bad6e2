"""PyTorch's FSDP2 behind the engine protocol: parameters, gradients and optimizer state are sharded by block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from harness.config import Config
from harness.engines.native import NativeEngine
from harness.model import build_model, is_block
from harness.ranks import World


class FSDPEngine(NativeEngine):
    """``fully_shard`` on every transformer block and on the root, which holds what lies outside the blocks.

    Shards are fp32. ``precision=bf16`` gathers and computes in bf16 and reduces gradients in fp32. Under accumulation
    gradients stay whole on every rank until the last micro batch, which alone reduces them.
    """

    def __init__(self, config: Config, world: World):
        self._mesh = init_device_mesh(world.device.type, (world.size,))
        half = torch.bfloat16 if config.precision == "bf16" else None
        self._options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": config.engine.reshard,
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        }
        model = build_model(config, torch.float32, self._shard)
        # the count of target tokens must not be rounded; a block's inputs may be cast
        whole_inputs = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
        root_options = self._options | {"mp_policy": whole_inputs}
        if config.engine.reshard:
            root_options["reshard_after_forward"] = None  # FSDP2's own choice for a root: it is needed again at once
        fully_shard(model, **root_options)
        settings = {
            "reshard_after_forward": config.engine.reshard,
            "param_dtype": str(half) if half else "torch.float32",
            "reduce_dtype": "torch.float32",
            "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        }
        arithmetic = "bf16 gathered from fp32 shards" if half else "fp32"
        super().__init__(config, world, model, settings, arithmetic, sharded=True)

    def _shard(self, unit: nn.Module) -> None:
        """Shard a block over the ranks; what lies outside blocks is sharded with the root."""
        if is_block(unit):
            fully_shard(unit, **self._options)

    @property
    def _root(self) -> Any:
        """The root as FSDP2 extends it."""
        assert isinstance(self.module, FSDPModule)
        return self.module

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().evaluate(input_ids, labels, targets)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass nothing else would
        return loss
