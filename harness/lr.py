"""Learning rates: the scaling rule over the batch and the schedule over the samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config import LRConfig


def scaled_rate(lr: LRConfig, global_batch_size: int) -> float:
    """The peak rate of a global batch: ``lr.base`` times the rule of batch / base batch.

    ``linear``: k (Goyal et al. 2017, arXiv:1706.02677); ``sqrt``: sqrt(k) (Malladi et al. 2022,
    arXiv:2205.10287, for Adam); ``none``: 1.
    """
    assert lr.base is not None
    ratio = global_batch_size / lr.base_batch_size
    return lr.base * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[lr.rule]


def rate_at(lr: LRConfig, samples: int, batch_size: int, total_samples: int) -> float:
    """The rate of the update that takes ``batch_size`` samples after ``samples`` were taken.

    Warm-up and decay are counted in samples, so that runs of different batch sizes follow one curve. The rate
    rises linearly to its peak at ``lr.warmup_samples`` and decays to ``lr.final_fraction`` of it at
    ``total_samples``.
    """
    peak = scaled_rate(lr, batch_size)
    if samples + batch_size < lr.warmup_samples:
        return peak * (samples + batch_size) / lr.warmup_samples
    decay_samples = total_samples - lr.warmup_samples
    progress = min(1.0, max(0, samples - lr.warmup_samples) / decay_samples) if decay_samples > 0 else 0.0
    remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return peak * (lr.final_fraction + (1 - lr.final_fraction) * remaining[lr.schedule])


def surge_factor(batch: float, noise_scale: float) -> float:
    """Best rate of Adam-like optimizers over its peak at batch = noise scale: 2 / (sqrt(Bn/B) + sqrt(B/Bn)).

    Rises like a square root and falls again beyond (Li et al. 2024, arXiv:2405.14578, equation 2).

    Raises:
        ValueError: a batch or noise scale that is not positive.
    """
    if not (batch > 0 and noise_scale > 0):
        raise ValueError(f"batch={batch}, noise_scale={noise_scale}: must be above 0")
    root = math.sqrt(batch / noise_scale)
    return 2 / (root + 1 / root)


def noise_limited_factor(batch: float, noise_scale: float) -> float:
    """Best rate of SGD over its peak at endless batches: 1 / (1 + Bn/B) (McCandlish et al. 2018, arXiv:1812.06162)."""
    if not (batch > 0 and noise_scale > 0):
        raise ValueError(f"batch={batch}, noise_scale={noise_scale}: must be above 0")
    return 1 / (1 + noise_scale / batch)


@dataclass(frozen=True)
class AdamSettings:
    """What the square-root rule changes together."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scale_adam(adam: AdamSettings, ratio: float) -> AdamSettings:
    """Adam at ``ratio`` times the batch, following the same path in samples.

    lr sqrt(k), beta -> 1 - k (1 - beta), eps / sqrt(k) (Malladi et al. 2022, arXiv:2205.10287, square-root rule).

    Raises:
        ValueError: a ratio that is not positive, or so large that it leaves a beta nothing to average over.
    """
    if not ratio > 0:
        raise ValueError(f"ratio={ratio}: must be above 0")
    worst = min(adam.betas)
    if ratio > 1 and ratio * (1 - worst) >= 1 - 1e-12:
        limit = 1 / (1 - worst)
        raise ValueError(f"ratio={ratio}: the square-root rule needs less than {limit:.6g} at a beta of {worst}")
    first, second = (1 - ratio * (1 - beta) for beta in adam.betas)
    return AdamSettings(adam.lr * math.sqrt(ratio), (first, second), adam.eps / math.sqrt(ratio))
