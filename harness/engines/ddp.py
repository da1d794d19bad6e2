"""PyTorch's DistributedDataParallel behind the engine protocol: every rank holds everything."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.config import Config, grad_accum_steps
from harness.engines.native import NativeEngine
from harness.model import LossModel, build_model
from harness.ranks import World

# What torch calls the choice whether every forward pass broadcasts buffers.
BUFFERS_IN_FORWARD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class DDPEngine(NativeEngine):
    """DDP over fp32 weights; ``precision=bf16`` computes under autocast.

    Gradients live in DDP's buckets and are all-reduced bucket by bucket, each as soon as it is full, or with
    ``engine.overlap=false`` all of them after the backward pass.
    """

    module: DistributedDataParallel

    def __init__(self, config: Config, world: World):
        model = build_model(config, torch.float32).to(world.device)
        on_gpu = world.device.type == "cuda"
        options: dict[str, Any] = {
            "bucket_cap_mb": config.engine.bucket_mb,  # null is torch's own default
            "gradient_as_bucket_view": True,
            BUFFERS_IN_FORWARD: False,  # no module of ours changes its buffers
            "device_ids": [world.local_rank] if on_gpu else None,
        }
        wrapped = DistributedDataParallel(model, **options)
        if not config.engine.overlap:
            wrapped.register_comm_hook(None, after_backward(world))
        if config.model.compile:
            torch._dynamo.config.optimize_ddp = False  # it would split at buckets what is already split at blocks
        self._autocast = torch.bfloat16 if config.precision == "bf16" else None
        settings = options | {"overlap": config.engine.overlap, "autocast": str(self._autocast)}
        arithmetic = "bf16 autocast over fp32 weights" if self._autocast else "fp32"
        super().__init__(config, world, wrapped, settings, arithmetic, sharded=False)
        self._accumulates = grad_accum_steps(config.batch) > 1

    @property
    def loss_model(self) -> LossModel:
        return self.module.module

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()

    def clear_gradients(self) -> None:
        """Zero in place where micro batches add up, so that they add into the buckets."""
        self.optimizer.zero_grad(set_to_none=not self._accumulates)

    def computing(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.world.device.type, self._autocast) if self._autocast else nullcontext()


def after_backward(world: World) -> Any:
    """A DDP communication hook that keeps every bucket until the last is full, then all-reduces them in order."""
    waiting: list[tuple[torch.Tensor, torch.futures.Future]] = []
    devices: list[Any] = [world.device] if world.device.type == "cuda" else []

    def hook(state, bucket):  # DDP checks annotations by identity: none are allowed here
        future: torch.futures.Future = torch.futures.Future(devices=devices)
        waiting.append((bucket.buffer(), future))
        if bucket.is_last():
            for buffer, done in waiting:
                dist.all_reduce(buffer.div_(world.size))
                done.set_result(buffer)
            waiting.clear()
        return future

    return hook
