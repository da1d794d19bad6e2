"""The parameters of a model one by one, in the modules that hold them and in the order of the forward pass.

Sums over a model do not need this; what a library pads, keeps whole or gathers per parameter does. The tree is that
of GPT-2 and Llama in transformers, modules without parameters included, because DeepSpeed looks ahead at every
module. Sizes are exact for the families of :data:`harness.shape.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from harness.shape import ModelShape


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    elements: int
    rows: int  # size of the first dimension, along which FSDP2 shards


@dataclass(frozen=True)
class Module:
    """A module, the parameters that are its own, and the modules it calls in order."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    children: tuple[Module, ...] = ()
    is_block: bool = False
    differentiable_input: bool = True  # false for embeddings, whose input has no gradient

    def walk(self) -> Iterator[Module]:
        """This module and everything below it, in the order of the forward pass."""
        yield self
        for child in self.children:
            yield from child.walk()


@cache
def module_tree(shape: ModelShape) -> Module:
    """The model below the module that computes the loss; a tied projection holds the token embedding's parameter."""
    tokens = Parameter("embedding", shape.vocab_size * shape.hidden_size, shape.vocab_size)
    stack = [Module("embedding", (tokens,), differentiable_input=False)]
    if shape.learned_positions:
        rows = shape.learned_positions
        positions = Parameter("positions", rows * shape.hidden_size, rows)
        stack += [Module("positions", (positions,), differentiable_input=False), Module("dropout")]
    else:
        stack.append(Module("rotary"))
    stack += [block(shape, number) for number in range(shape.layers)]
    stack.append(norm("norm", shape))
    projection = tokens if shape.tied else Parameter("projection", tokens.elements, shape.vocab_size)
    decoder = Module("decoder", children=tuple(stack), differentiable_input=False)
    head = Module("projection", (projection,))
    return Module("loss", children=(Module("model", children=(decoder, head), differentiable_input=False),),
                  differentiable_input=False)  # fmt: skip


@cache
def parameters_of(shape: ModelShape) -> tuple[Parameter, ...]:
    """Every parameter once, a tied one where it is first used."""
    return tuple(dict.fromkeys(parameter for module in module_tree(shape).walk() for parameter in module.parameters))


def block(shape: ModelShape, number: int) -> Module:
    """One transformer block."""
    hidden, inner, name = shape.hidden_size, shape.intermediate_size, f"blocks.{number}"
    query, kv = shape.query_size, shape.kv_size
    if shape.fused_qkv:
        attention = [linear(f"{name}.qkv", hidden, query + 2 * kv, shape.qkv_bias, transposed=True)]
    else:
        attention = []
        for part, size in (("query", query), ("key", kv), ("value", kv)):
            attention.append(linear(f"{name}.{part}", hidden, size, shape.qkv_bias))
            if shape.qk_norm and part != "value":
                weight = Parameter(f"{name}.{part}_norm.weight", shape.head_dim, shape.head_dim)
                attention.append(Module(f"{name}.{part}_norm", (weight,)))
    attention.append(linear(f"{name}.out", query, hidden, shape.out_bias, transposed=shape.fused_qkv))
    up = linear(f"{name}.up", hidden, inner, shape.mlp_bias, transposed=shape.fused_qkv)
    activation = Module(f"{name}.activation")
    mlp = (
        [linear(f"{name}.gate", hidden, inner, shape.mlp_bias), activation, up] if shape.gated_mlp else [up, activation]
    )
    mlp.append(linear(f"{name}.down", inner, hidden, shape.mlp_bias, transposed=shape.fused_qkv))
    if shape.fused_qkv:
        attention.append(Module(f"{name}.attention_dropout"))
        mlp.append(Module(f"{name}.mlp_dropout"))
    children = (
        norm(f"{name}.norm1", shape),
        Module(f"{name}.attention", children=tuple(attention)),
        norm(f"{name}.norm2", shape),
        Module(f"{name}.mlp", children=tuple(mlp)),
    )
    return Module(name, children=children, is_block=True)


def linear(name: str, inputs: int, outputs: int, bias: bool, transposed: bool = False) -> Module:
    """A linear layer; GPT-2 keeps its weights transposed."""
    parameters = [Parameter(f"{name}.weight", inputs * outputs, inputs if transposed else outputs)]
    if bias:
        parameters.append(Parameter(f"{name}.bias", outputs, outputs))
    return Module(name, tuple(parameters))


def norm(name: str, shape: ModelShape) -> Module:
    parameters = [Parameter(f"{name}.weight", shape.hidden_size, shape.hidden_size)]
    if shape.norm_bias:
        parameters.append(Parameter(f"{name}.bias", shape.hidden_size, shape.hidden_size))
    return Module(name, tuple(parameters))
