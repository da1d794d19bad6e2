"""Which parameters DeepSpeed's stage 3 gathers and when, replayed without a rank.

DeepSpeed gathers a module's parameters before it computes and releases them after it, gathers ahead while fewer than
``stage3_max_live_parameters`` elements are whole, and keeps what is needed again soon
(deepspeed/runtime/zero/partitioned_param_coordinator.py). With few live parameters everything is gathered twice per
micro step, once forward and once backward; with more live parameters, less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from harness.parameters import Module, Parameter, module_tree
from harness.shape import ModelShape

Turn = tuple[Module, bool]  # a module's turn starts (its parameters are needed) or ends
NEVER = -1


@dataclass(frozen=True)
class LookAhead:
    """What DeepSpeed is told about gathering, in elements."""

    prefetch_bucket: int
    persistence_threshold: int
    max_live: int
    max_reuse_distance: int


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing, as in the config group."""

    mode: str = "none"
    every: int = 2
    part: str = "block"
    reentrant: bool = False

    def covers(self, module: Module, block_number: int | None) -> bool:
        """Whether the backward pass computes this module again from its input."""
        if self.mode == "none" or block_number is None:
            return False
        if self.mode == "selective" and self.part == "attention":
            return module.name.endswith(".attention")
        return module.is_block and (self.mode == "full" or block_number % self.every == 0)


def persistent_parameters(parameters: tuple[Parameter, ...], threshold: int) -> frozenset[Parameter]:
    """Parameters that every rank keeps whole: those of at most ``stage3_param_persistence_threshold`` elements."""
    return frozenset(parameter for parameter in parameters if parameter.elements <= threshold)


def micro_step(shape: ModelShape, recompute: Recompute) -> list[Turn]:
    """Every module's turns in one forward and backward pass."""
    tree = module_tree(shape)
    return forward(tree) + backward(tree, recompute)


def forward(module: Module) -> list[Turn]:
    return [(module, True), *(turn for child in module.children for turn in forward(child)), (module, False)]


def backward(module: Module, recompute: Recompute, block_number: int | None = None) -> list[Turn]:
    """The backward pass: modules in reverse, with the forward pass of recomputed ones inside."""
    turns: list[Turn] = [(module, True)]
    numbers: list[int | None] = []
    for child in module.children:
        blocks = sum(number is not None for number in numbers) if child.is_block else None
        numbers.append(blocks)
    for child, number in zip(reversed(module.children), reversed(numbers), strict=True):
        turns += backward(child, recompute, block_number if number is None else number)
    if module.differentiable_input:  # DeepSpeed hears of the end by the gradient of the input
        turns.append((module, False))
    return with_recompute(module, turns, recompute) if recompute.covers(module, block_number) else turns


def with_recompute(module: Module, turns: list[Turn], recompute: Recompute) -> list[Turn]:
    """A module's backward turns with its forward pass where torch's checkpoint puts it.

    The reentrant kind runs all of it before. The other runs it when the first tensor that was not kept is asked for,
    by the last module with parameters, and stops in that module.
    """
    again = forward(module) if module.is_block else [turn for child in module.children for turn in forward(child)]
    if recompute.reentrant:
        return again + turns
    first = next(place for place, (each, starts) in enumerate(turns) if starts and each.parameters)
    stops = max(place for place, turn in enumerate(again) if turn == (turns[first][0], True))
    return turns[: first + 1] + again[: stops + 1] + turns[first + 1 :]


@lru_cache
def gathers(
    shape: ModelShape, recompute: Recompute, ahead: LookAhead, accumulates: bool
) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each all-gather of one micro step, in steady state.

    Args:
        accumulates: more than one micro step per update. DeepSpeed decides what each module releases in the first
            micro step after it has recorded their order, and keeps to it. With accumulation that one still belongs
            to the first update, and the parameters that are to stay whole do not yet.
    """
    turns = micro_step(shape, recompute)
    kept: KeptAtRelease = {}
    if accumulates:
        Replay(turns, ahead, kept, settled=False).run()
    return Replay(turns, ahead, kept).run()


KeptAtRelease = dict[tuple[str, int], frozenset[Parameter]]  # by module and turns so far


class Replay:
    """One micro step of DeepSpeed's coordinator; names follow its fields.

    Args:
        kept: what earlier micro steps decided to keep at each release; decisions of this one are added.
        settled: the parameters that are to stay whole already do.
    """

    def __init__(self, turns: list[Turn], ahead: LookAhead, kept: KeptAtRelease, settled: bool = True):
        self.turns = turns
        self.kept = kept
        self.ahead = ahead
        self.order = [module for module, starts in turns if starts]
        self.queue = deque((p, step) for step, module in enumerate(self.order) for p in own_parameters(module))
        every = tuple({p for module in self.order for p in module.parameters})
        self.persistent = persistent_parameters(every, ahead.persistence_threshold)
        self.available = set(self.persistent) if settled else set()
        self.fetched_for: dict[Parameter, int] = {}
        self.active: dict[Parameter, set[str]] = {}
        self.live = 0  # elements
        self.step = 0
        self.gathered: list[tuple[Parameter, ...]] = []

    def run(self) -> tuple[tuple[Parameter, ...], ...]:
        for module, starts in self.turns:
            if starts:
                self.fetch(module)
            else:
                self.release(module)
        return tuple(self.gathered)

    def gather(self, parameters: list[Parameter]) -> None:
        missing = tuple(p for p in parameters if p not in self.available)
        if missing:
            self.gathered.append(missing)
            self.available.update(missing)
            self.live += sum(p.elements for p in missing)

    def fetch(self, module: Module) -> None:
        wanted = own_parameters(module)
        self.gather(wanted)
        for parameter in wanted:
            self.active.setdefault(parameter, set()).add(module.name)
        for _ in range(sum(self.fetched_for.get(p, NEVER) < self.step for p in wanted)):
            parameter, step = self.queue.popleft()
            self.fetched_for[parameter] = step
        if self.ahead.prefetch_bucket > 0:
            self.prefetch()
        self.step += 1

    def prefetch(self) -> None:
        room = min(self.ahead.max_live - self.live, self.ahead.prefetch_bucket)
        ahead: list[Parameter] = []
        elements = 0
        while self.queue and elements < room:
            parameter, step = self.queue.popleft()
            self.fetched_for[parameter] = max(self.fetched_for.get(parameter, NEVER), step)
            if parameter not in self.available and parameter not in ahead:
                ahead.append(parameter)
                elements += parameter.elements
        self.gather(ahead)

    def release(self, module: Module) -> None:
        place = (module.name, self.step)
        if place not in self.kept:
            self.kept[place] = self.kept_at_release(module)
        for parameter in own_parameters(module):
            self.active[parameter].discard(module.name)
            if parameter not in self.kept[place] and parameter in self.available and not self.active[parameter]:
                self.available.discard(parameter)
                self.live -= parameter.elements

    def kept_at_release(self, module: Module) -> frozenset[Parameter]:
        """What stays although its module is done: persistent, gathered ahead for later, or needed again soon."""
        kept = {p for p in module.parameters if p in self.persistent or self.fetched_for.get(p, NEVER) > self.step}
        passed = 0
        for later in self.order[self.step :]:
            if passed >= self.ahead.max_reuse_distance:
                break
            kept.update(later.parameters)
            passed += sum(p.elements for p in later.parameters)
        return frozenset(kept)


def own_parameters(module: Module) -> list[Parameter]:
    return list(dict.fromkeys(module.parameters))
