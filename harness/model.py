"""Hugging Face causal language models whose initial weights depend on nothing but (seed, model).

A model is built on the meta device and filled unit by unit (a transformer block, an embedding, a head), each unit
from a random stream of its own. Under ZeRO-3 each unit is sharded before the next is filled, so that no rank ever
holds the whole model; everywhere else the same units are simply kept.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.config import CheckpointingConfig, Config, ConfigError, ModelConfig, one_line
from harness.hf_config import hf_config, local_or_name
from harness.kernels import apply_kernels


class LossModel(nn.Module):
    """The module an engine wraps: from a micro batch to its share of the global batch's mean loss.

    Only the loss leaves the module: DeepSpeed hooks every tensor that a wrapped module returns.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        fused_loss = "skip_logits" in inspect.signature(model.forward).parameters
        self._options = {"skip_logits": True} if fused_loss else {}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed token loss / ``targets``.

        Args:
            input_ids, labels: int64 (sequences, seq_len); labels are not shifted, ignored where negative.
            targets: predicted tokens of the global batch, a scalar tensor.
        """
        return self.model(
            input_ids=input_ids, labels=labels, num_items_in_batch=targets, use_cache=False, **self._options
        ).loss


def set_dropout(settings: Any, probability: float) -> list[str]:
    """Set every dropout of a transformers config; the names of those that were different."""
    names = [
        n
        for n, value in vars(settings).items()
        if isinstance(value, (int, float)) and ("dropout" in n or n.endswith(("pdrop", "dropout_prob")))
    ]
    changed = [name for name in names if getattr(settings, name) != probability]
    for name in changed:
        setattr(settings, name, probability)
    return changed


def meta_model(config: Config) -> Any:
    """The model of a config with every tensor on the meta device: shapes without memory.

    Raises:
        ConfigError: when transformers cannot build it, or its loss cannot be normalised over a global batch.
    """
    from transformers import AutoModelForCausalLM

    settings = hf_config(config.model)
    changed = set_dropout(settings, config.model.dropout)
    if changed:
        print(f"model.dropout={config.model.dropout}: set {', '.join(changed)} of the model's own config")
    settings.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                settings,
                dtype=torch.float32,
                attn_implementation=config.model.attention,
                trust_remote_code=config.model.trust_remote_code,
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model={config.model.name}: cannot be built ({one_line(error)})") from error
    if not getattr(model, "accepts_loss_kwargs", True):
        raise ConfigError(f"model={config.model.name}: its loss cannot be normalised over a global batch")
    apply_kernels(model, config.model)
    return model


def build_model(config: Config, dtype: torch.dtype, shard: Callable[[nn.Module], None] | None = None) -> LossModel:
    """A model in training mode on the CPU, in ``dtype``.

    Args:
        dtype: of the parameters; weights are drawn in fp32 and then converted.
        shard: called with each unit as soon as it is filled; ZeRO-3 partitions it here.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = meta_model(config)
    fill = (
        pretrained_filler(config.model, model) if config.model.path is not None else random_filler(config.seed, model)
    )
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    filled: set[int] = set()  # a tied parameter is filled with the first unit that has it
    for unit_name, unit in list(units(model)):
        with torch.no_grad():
            materialise(unit, owners)
            fill(unit_name, unit, filled)
            for parameter in unit.parameters():
                if id(parameter) not in filled:
                    parameter.data = parameter.data.to(dtype)
        if shard is not None:
            shard(unit)  # may put other parameters in place of the unit's
        filled.update(id(parameter) for parameter in unit.parameters())
    model.train()
    apply_checkpointing(model, config.checkpointing)
    if config.model.compile:
        compile_blocks(model)
    return LossModel(model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model, in order."""
    return [module for module in model.modules() if is_block(module)]


def is_block(module: nn.Module) -> bool:
    """Whether a module is a transformer block."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that are filled as one: each block, and outside blocks each module with tensors of its own."""
    inside: set[int] = set()
    for block in blocks(model):
        inside.update(id(module) for module in block.modules() if module is not block)
    block_ids = {id(block) for block in blocks(model)}
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if id(module) in block_ids or own:
            yield name, module


def materialise(unit: nn.Module, owners: dict[int, list[tuple[nn.Module, str]]]) -> None:
    """Give a unit's meta tensors memory on the CPU; a tied parameter stays one parameter in all its modules."""
    for module in unit.modules():
        for _, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
                for owner, name in owners[id(parameter)]:
                    setattr(owner, name, real)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


Filler = Callable[[str, nn.Module, set[int]], None]  # (name of the unit, unit, ids of parameters filled before)


def random_filler(seed: int, model: Any) -> Filler:
    """Fills a unit with transformers' own initialisation, from a random stream named by seed and unit."""

    def fill(unit_name: str, unit: nn.Module, filled: set[int]) -> None:
        stream = int.from_bytes(hashlib.sha256(f"{seed}/{unit_name}".encode()).digest()[:8], "little")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream)
            initialise(model, unit, filled)

    return fill


def initialise(model: Any, module: nn.Module, filled: set[int]) -> None:
    """``model._init_weights`` on a module, children first, leaving alone what is filled."""
    for child in module.children():
        initialise(model, child, filled)
    if not any(id(parameter) in filled for parameter in module.parameters(recurse=False)):
        model._init_weights(module)


def pretrained_filler(settings: ModelConfig, model: Any) -> Filler:
    """Fills a unit from a checkpoint: tensor by tensor from safetensors where the names agree, else from a full load."""
    tensors = lazy_tensors(settings, model)

    def fill(unit_name: str, unit: nn.Module, filled: set[int]) -> None:
        initialise(model, unit, filled)  # buffers that no checkpoint holds
        for name, parameter in unit.named_parameters():
            if id(parameter) not in filled:
                parameter.copy_(tensors(f"{unit_name}.{name}"))
        for name, buffer in unit.named_buffers():
            saved = tensors(f"{unit_name}.{name}", None)
            if saved is not None:
                buffer.copy_(saved)

    return fill


def lazy_tensors(settings: ModelConfig, model: Any) -> Callable[..., Any]:
    """A function from a parameter's name to its saved tensor, read from disk when asked for.

    Raises:
        ConfigError: when the checkpoint cannot be read.
    """
    from transformers import AutoModelForCausalLM

    folder = local_or_name(settings.path or "")
    wanted = {name for name, _ in model.named_parameters()}
    files = safetensors_files(folder)
    prefix = f"{model.base_model_prefix}."
    for rename in (lambda n: n, lambda n: n.removeprefix(prefix)):
        if files and all(rename(name) in files for name in wanted):
            return lambda name, *default: read_tensor(files, rename(name), *default)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            **settings.config,
        )
    except Exception as error:
        raise ConfigError(f"model.path={settings.path}: its weights cannot be loaded ({one_line(error)})") from error
    full_model, loading = loaded
    absent = sorted({*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])} & wanted)
    if absent:
        raise ConfigError(f"model.path={settings.path}: holds no weights for {absent[0]} and {len(absent) - 1} more")
    full = full_model.state_dict()
    return lambda name, *default: full.get(name, *default) if default else full[name]


def safetensors_files(folder: str) -> dict[str, Path]:
    """Which safetensors file of a local checkpoint folder holds which tensor; empty for anything else."""
    from safetensors import safe_open

    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def read_tensor(files: dict[str, Path], name: str, *default: Any) -> Any:
    from safetensors import safe_open

    if name not in files and default:
        return default[0]
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)


def apply_checkpointing(model: Any, checkpointing: CheckpointingConfig) -> None:
    """Recompute activations in the backward pass as ``checkpointing`` says."""
    if checkpointing.mode == "none":
        return
    if checkpointing.mode == "selective" and checkpointing.part == "attention":
        for block in blocks(model):
            recompute(attention_of(block), checkpointing.reentrant)
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing.reentrant})
    if checkpointing.mode == "selective":
        for number, block in enumerate(blocks(model)):
            block.gradient_checkpointing = number % checkpointing.every == 0  # type: ignore[assignment]


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward pass of every block on its own: blocks of one kind share their compiled code, and what an
    engine hooks onto a block stays outside."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks(model)))
    for block in blocks(model):
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]


def attention_of(block: nn.Module) -> nn.Module:
    for name, child in block.named_children():
        if "attn" in name or "attention" in name:
            return child
    raise ConfigError("checkpointing.part=attention: this model's blocks have no attention module of that name")


def recompute(module: nn.Module, reentrant: bool) -> None:
    """Wrap a module's forward pass in torch's activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)  # the reentrant kind looks for gradients among positional arguments only

        def call(*values: Any) -> Any:
            return forward(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        return checkpoint(call, *args, *kwargs.values(), use_reentrant=reentrant)

    module.forward = checkpointed  # type: ignore[method-assign]
