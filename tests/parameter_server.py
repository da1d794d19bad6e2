"""A parameter server as one would write it first: one copy of the weights per worker, gradients computed on it.

Shares nothing with the emulation but the clock's times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.clock import Clock

SEQUENCES = 8.0
LAWS = ("constant", "lognormal", "exponential", "stragglers", "trace", "speeds")
TRACE = ((0.9, 1.3, 0.7, 2.0, 1.1, 0.6, 1.0), (1.0, 1.0, 4.0, 1.0), (0.5, 0.8), (1.2, 1.1, 1.0), (2.0, 1.9))


def clock_of(law: str, workers: int, seed: int = 0) -> Clock:
    """A clock of each law with times spread enough to change the order of arrivals."""
    if law == "trace":
        return Clock("trace", trace=(TRACE * workers)[:workers], seed=seed)
    if law == "speeds":
        return Clock("exponential", speeds=tuple(1 / (1 + i) for i in range(workers)), seed=seed)
    return Clock(law, mean_s=0.5, cv={"stragglers": 1.0}.get(law, 0.25), seed=seed)


class TokenModel(nn.Module):
    """Two hidden layers, 64 wide, over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.hidden(self.embed(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_model() -> TokenModel:
    torch.manual_seed(1)
    return TokenModel()


def batch(k: int) -> Tensor:
    return torch.randint(0, 32, (8, 17), generator=torch.Generator().manual_seed(100 + k))


def gradient_of_tokens(model: nn.Module, k: int) -> list[Tensor]:
    return list(torch.autograd.grad(model(batch(k)), list(model.parameters())))


def worst_distance(a: nn.Module, b: nn.Module) -> float:
    """Largest relative distance of a tensor, over all tensors of two models."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


@dataclass
class NaiveServer:
    """Runs `gradients` gradients to the end and leaves its weights in `model`.

    `correct` maps (gradient, weights now, weights pulled) to the gradient that is used; `rate` maps (staleness of
    the group, gradients applied before) to the learning rate, None leaves it alone; `gradient` maps (model, k) to the
    gradient of batch k, of `sequences` sequences.
    """

    clock: Clock
    workers: int
    gradients: int
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    per_update: int = 1
    max_staleness: int | None = None
    drain: str = "apply"
    correct: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]] | None = None
    rate: Callable[[list[int], int], float] | None = None
    model: nn.Module = field(default_factory=build_model)
    gradient: Callable[[Any, int], list[Tensor]] = gradient_of_tokens
    sequences: float = SEQUENCES
    staleness: list[int] = field(default_factory=list)
    applied: int = 0
    updates: int = 0
    now: float = 0.0

    def run(self) -> NaiveServer:
        optimizer = self.make_optimizer(self.model.parameters())
        free = list(range(self.workers))
        done = [0] * self.workers
        job: dict[int, tuple[float, int, int, nn.Module]] = {}
        taken = 0
        group: list[tuple[int, list[Tensor]]] = []
        while True:
            allowed = [w for w in free if self.max_staleness is None or done[w] <= min(done) + self.max_staleness]
            if allowed and taken < self.gradients:
                w = allowed[0]
                free.remove(w)
                finish = self.now + self.clock.seconds(w, done[w], self.sequences)
                job[w] = (finish, taken, self.updates, copy.deepcopy(self.model))
                taken += 1
                continue
            if not job or (allowed and self.drain == "drop"):
                return self
            w = min(job, key=lambda worker: job[worker][:2])
            self.now, k, version, pulled = job.pop(w)
            done[w] += 1
            free.append(w)
            gradients = self.gradient(pulled, k)
            if self.correct is not None:
                now = [p.detach() for p in self.model.parameters()]
                gradients = self.correct(gradients, now, [p.detach() for p in pulled.parameters()])
            group.append((self.updates - version, gradients))
            if len(group) == self.per_update or (not job and taken == self.gradients and self.drain == "apply"):
                self.apply(optimizer, group)
                group = []

    def apply(self, optimizer: torch.optim.Optimizer, group: list[tuple[int, list[Tensor]]]) -> None:
        for i, p in enumerate(self.model.parameters()):
            p.grad = sum((gradients[i] for _, gradients in group[1:]), group[0][1][i]) / len(group)
        if self.rate is not None:
            optimizer.param_groups[0]["lr"] = self.rate([s for s, _ in group], self.applied)
        optimizer.step()
        self.staleness += [s for s, _ in group]
        self.applied += len(group)
        self.updates += 1
