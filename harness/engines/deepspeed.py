"""DeepSpeed behind the engine protocol: ZeRO stages 0 to 3."""

from __future__ import annotations

import unittest.mock
from typing import Any

import deepspeed
import torch
from torch import nn

from harness.config import Config
from harness.ds_config import build_ds_config
from harness.engines import build_optimizer
from harness.measure.memory import unique_bytes
from harness.model import build_model, meta_model
from harness.ranks import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# On CPU DeepSpeed would compile a shared-memory collective at start-up. Only its inference all-reduce uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed looks at every optimizer for its Muon, whose module imports torch's whole compiler to decorate two functions.
with unittest.mock.patch("torch.compile", lambda *_, **__: lambda function: function):
    import deepspeed.runtime.zero.muon.original_muon


class DeepSpeedEngine:
    """A ``deepspeed.initialize`` engine on a Hugging Face model, with a torch optimizer as its client optimizer."""

    def __init__(self, config: Config, world: World):
        deepspeed.init_distributed(world.backend, verbose=False)
        self.world = world
        self.stage = config.zero.stage
        self.n_params = sum(p.numel() for p in meta_model(config).parameters())
        self.settings = build_ds_config(config, self.n_params)
        dtype = DTYPES[config.precision]
        shard = self._partition if self.stage == 3 else None
        model = build_model(config, dtype, shard)
        if self.stage < 3:
            model.to(world.device)
        parameters = list(model.parameters())
        self.optimizer = build_optimizer(config, parameters)
        self._updates = 0
        self._held: dict[str, int] = {}
        self._norm: torch.Tensor | None = None
        self._clip_norm = config.optimizer.clip_norm
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, model_parameters=parameters, config=self.settings
        )
        self.engine.clip_fp32_gradients = self._clip_unsharded
        for state in self.optimizer.state.values():
            if "step" in state:  # stage 0 in 16 bit allocates the state by a step on zeros, which must not count
                state["step"].zero_()
        self.optimizer.register_step_pre_hook(self._before_inner_step)

    def _partition(self, unit: nn.Module) -> None:
        """Shard a unit's parameters over the ranks; its buffers stay whole."""
        deepspeed.zero.Init(module=unit, config_dict_or_path=self.settings)
        for module in unit.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.world.device)

    def forward_backward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, last: bool
    ) -> torch.Tensor:
        loss = self.engine(input_ids, labels, targets)
        # DeepSpeed averages gradients over ranks; shares are to be summed.
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        if not last:
            self.engine.step()
        return loss.detach()

    def step(self, rate: float) -> torch.Tensor | float | None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._norm = None
        if self._clip_norm == 0 and self.engine.optimizer is self.optimizer:
            self._clip_unsharded()
        self.engine.step()
        self._updates += 1
        return self._norm if self._norm is not None else self.engine.get_global_grad_norm()

    def _clip_unsharded(self) -> None:
        """DeepSpeed's clipping at stage 0 in fp32 does not tell the norm; this does the same and keeps it."""
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        self._norm = nn.utils.get_total_norm(gradients)
        if self._clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), self._clip_norm, self._norm)

    @torch.no_grad()
    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.engine.eval()
        loss = self.engine(input_ids, labels, targets)
        self.engine.train()
        return loss

    @property
    def skipped_steps(self) -> int:
        return self.engine.skipped_steps

    def held_bytes(self) -> dict[str, int]:
        return self._held

    def _before_inner_step(self, *_: Any) -> None:
        if self._updates == 1 and not self._held:
            self._held = {kind: unique_bytes(tensors) for kind, tensors in self._held_tensors().items()}

    def _held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor of the model's state that this rank holds, by what it is for."""
        zero = self.engine.optimizer
        parameters = list(self.engine.module.parameters())
        held = [p.data for p in parameters] + [p.ds_tensor.data for p in parameters if hasattr(p, "ds_tensor")]
        gradients = [p.grad for p in parameters if p.grad is not None]
        masters: list[torch.Tensor] = [
            m for group in getattr(zero, "fp32_groups", []) for m in group
        ]  # stage 0, 16 bit
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            masters += getattr(zero, name, [])
        gradients += [m.grad for m in masters if m.grad is not None]
        for averaged in getattr(zero, "averaged_gradients", {}).values():
            gradients += averaged if isinstance(averaged, (list, tuple)) else [averaged]
        if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
            gradients.append(zero.grad_partitions_flat_buffer)
        gradients += getattr(zero, "accumulated_grads_in_cpu", {}).values()  # stage 2, offloaded and accumulating
        moments = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return {
            "param": held,
            "grad": [g for g in gradients if torch.is_tensor(g)],
            "optimizer": moments + [m.data for m in masters],
        }

    def full_parameters(self) -> dict[str, torch.Tensor]:
        whole = {}
        self.engine.empty_partition_cache()  # an evaluation leaves prefetched parameters in flight
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                whole[name.removeprefix("model.")] = parameter.detach().float().cpu().clone()
        return whole
