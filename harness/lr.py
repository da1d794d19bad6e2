"""Learning rates: the scaling rule over the batch and the schedule over the samples."""

from __future__ import annotations

import math

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
