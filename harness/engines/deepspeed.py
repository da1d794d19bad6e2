"""DeepSpeed behind the engine protocol: ZeRO stages 0 to 3."""

from __future__ import annotations

import sys
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from harness.checkpoint import Fragment
from harness.config import Config
from harness.ds_config import build_ds_config
from harness.engines import build_optimizer
from harness.measure.memory import HeldBytes
from harness.model import blocks, build_model, meta_model
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
        self.dtype = DTYPES[config.precision]
        self._exact: dict[nn.Parameter, torch.Tensor] = {}  # fp32 values of 16-bit parameters, until they have masters
        model = build_model(config, torch.float32, self._partition if self.stage == 3 else None)
        gather_blocks = config.model.compile if config.zero.whole_blocks is None else config.zero.whole_blocks
        if self.stage == 3 and gather_blocks:  # hooks on the modules inside would be in the compiler's way
            deepspeed.utils.set_z3_leaf_modules(model, list({type(block) for block in blocks(model)}))
        if self.stage < 3:
            self._exact = {p: self._convert(p) for p in model.parameters()}
            model.to(world.device)
        parameters = list(model.parameters())
        self.optimizer = build_optimizer(config, parameters)
        self.arithmetic = "fp32" if self.dtype == torch.float32 else f"{config.precision} weights, fp32 master weights"
        self._norm: torch.Tensor | None = None
        self._clip_norm = config.optimizer.clip_norm
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, model_parameters=parameters, config=self.settings
        )
        self.engine.clip_fp32_gradients = self._clip_unsharded
        zero = self.engine.optimizer
        self._exchange = None  # the stream on which gradients are reduced, where the host need not wait for it
        if self.dtype != torch.float16 and not config.zero.offload_optimizer:
            name = "reduce_and_partition_stream" if self.stage == 3 else "reduction_stream"
            self._exchange = getattr(zero, name, None)
        if self.stage > 0:
            zero.get_grad_norm_direct = norm_over_ranks
        self._set_masters()
        for state in self.optimizer.state.values():
            if "step" in state:  # stage 0 in 16 bit allocates the state by a step on zeros, which must not count
                state["step"].zero_()
        self._held = HeldBytes(self.optimizer, self._held_tensors)

    def _partition(self, unit: nn.Module) -> None:
        """Shard a unit's parameters over the ranks; its buffers stay whole."""
        exact = {p: self._convert(p) for p in unit.parameters() if not hasattr(p, "ds_tensor")}
        deepspeed.zero.Init(module=unit, config_dict_or_path=self.settings)
        if self.dtype != torch.float32:
            for parameter, whole in exact.items():
                count = parameter.ds_tensor.numel()  # type: ignore[attr-defined]  # the last rank's part is padded
                part = whole.flatten()[self.world.rank * count :][:count]
                self._exact[parameter] = nn.functional.pad(part, (0, count - part.numel()))
        for module in unit.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.world.device)

    def _convert(self, parameter: nn.Parameter) -> torch.Tensor:
        """Convert a parameter to the run's precision; its fp32 value before."""
        exact = parameter.data
        parameter.data = exact.to(self.dtype)
        return exact

    def _set_masters(self) -> None:
        """DeepSpeed makes fp32 master weights from rounded parameters. Rounded masters would swallow the first small
        updates of a run: give them the exact initial weights."""
        if self.dtype == torch.float32:
            self._exact.clear()
        masters = self._unsharded_masters() if self.stage == 0 and self._exact else {}
        for parameter, exact in self._exact.items():
            if self.stage == 0:
                masters[parameter].data.copy_(exact)
            elif self.stage == 3:
                deepspeed.utils.safe_set_local_fp32_param(parameter, exact)
            else:
                deepspeed.utils.safe_set_full_fp32_param(parameter, exact)
        self._exact.clear()

    def _unsharded_masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """The master weights of stage 0 in 16 bit, by parameter."""
        zero = self.engine.optimizer
        groups = zip(zero.fp16_groups, zero.fp32_groups, strict=True)
        return dict(pair for fp16, fp32 in groups for pair in zip(fp16, fp32, strict=True))

    def forward_backward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, last: bool
    ) -> torch.Tensor:
        loss = self.engine(input_ids, labels, targets)
        # DeepSpeed averages gradients over ranks; shares are to be summed.
        with self._host_ahead():
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
        with self._host_ahead():
            self.engine.step()
        self._held.updates += 1
        return self._norm if self._norm is not None else self.engine.get_global_grad_norm()

    def _host_ahead(self) -> AbstractContextManager[None]:
        """Around what DeepSpeed does after a forward pass: on a GPU the host does not wait for it."""
        return nullcontext() if self._exchange is None else host_ahead(self.engine.optimizer, self._exchange)

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
        return self._held.bytes

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

    @property
    def sharded(self) -> bool:
        return self.stage > 0

    def fragments(self) -> list[Fragment]:
        zero, rank = self.engine.optimizer, self.world.rank
        named = self._named_parameters()
        if self.stage == 0:
            if zero is self.optimizer:
                return [Fragment(name, 0, p.numel(), p, 0) for name, p in named.items()]
            names = {id(p): name for name, p in named.items()}
            pairs = zip(zero.fp16_groups, zero.fp32_groups, strict=True)
            both = [(p, master) for halves, masters in pairs for p, master in zip(halves, masters, strict=True)]
            return [Fragment(names[id(p)], 0, p.numel(), master, 0) for p, master in both]
        names = {id(p): name for name, p in named.items()}
        found = []
        if self.stage == 3:  # each parameter is cut into equal parts, the last padded
            for group, owner in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
                offset = 0
                for p in group:
                    size = p.partition_numel()
                    length = min(size, p.ds_numel - rank * size)
                    if length > 0:
                        found.append(Fragment(names[id(p)], rank * size, length, owner, offset))
                    offset += size
            return found
        for group, owner in zip(zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            first, position = rank * owner.numel(), 0  # the group is flattened, then cut into equal parts
            for p in group:
                low, high = max(position, first), min(position + p.numel(), first + owner.numel())
                if low < high:
                    found.append(Fragment(names[id(p)], low - position, high - low, owner, low - first))
                position += p.numel()
        return found

    @torch.no_grad()
    def refresh(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        for name, p in self._named_parameters().items():
            if self.stage == 3:
                size = p.partition_numel()
                start = self.world.rank * size
                length = min(size, p.ds_numel - start)
                if length > 0:
                    p.ds_tensor.data.view(-1)[:length].copy_(read(name, start, length))
            if p.numel() > 0:  # at stage 3 the parameters that every rank keeps
                p.data.copy_(read(name, 0, p.numel()).view(p.shape))

    def scalars(self) -> dict[str, float]:
        counters = {name: getattr(self.engine, name) for name in ("global_steps", "skipped_steps")}
        return counters | {f"scale/{name}": value for name, value in self._scaler().items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            if name.startswith("scale/"):
                setattr(self._scale_holder(), name.removeprefix("scale/"), value)
            else:
                setattr(self.engine, name, value)

    def _scale_holder(self) -> Any:
        """Where DeepSpeed keeps the loss scale of fp16."""
        return getattr(self.engine.optimizer, "loss_scaler", self.engine.optimizer)

    def _scaler(self) -> dict[str, float]:
        if DTYPES["fp16"] not in {p.dtype for p in self.engine.module.parameters()}:
            return {}
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(self._scale_holder(), name) for name in names if hasattr(self._scale_holder(), name)}

    def _named_parameters(self) -> dict[str, Any]:
        return {name.removeprefix("model."): p for name, p in self.engine.module.named_parameters()}

    def full_parameters(self) -> dict[str, torch.Tensor]:
        whole = {}
        self.engine.empty_partition_cache()  # an evaluation leaves prefetched parameters in flight
        for name, parameter in self._named_parameters().items():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                whole[name] = parameter.detach().float().cpu().clone()
        return whole


@contextmanager
def host_ahead(zero: Any, exchange: Any) -> Iterator[None]:
    """Streams wait for one another where DeepSpeed makes the host wait for the device: at the end of each backward pass,
    and in each step to look at the norm. So the host is still ahead when it comes to the step, whose many small calls
    would leave the device idle. A norm that is not finite ends a run anyway (fp16, where it does not, is left alone).

    Args:
        zero: DeepSpeed's optimizer of stages 1 to 3.
        exchange: the stream on which it reduces gradients.
    """
    accelerator, patch = deepspeed.get_accelerator(), unittest.mock.patch.object

    def wait(*_: Any) -> None:
        exchange.wait_stream(accelerator.current_stream())
        accelerator.current_stream().wait_stream(exchange)

    no_look = patch(sys.modules[type(zero).__module__], "is_invalid_grad_norm", lambda norm: False)
    with patch(accelerator, "synchronize", wait), patch(exchange, "synchronize", wait), no_look:
        yield


def norm_over_ranks(gradients: list[torch.Tensor], *_: Any) -> torch.Tensor:
    """The norm of gradients that are shared out over all ranks, in place of DeepSpeed's own, which starts several small
    kernels per parameter while the device waits. Padding is zero and adds nothing."""
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()
