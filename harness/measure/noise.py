"""Gradient noise scale and critical batch size: how large a batch still pays.

McCandlish et al. 2018 (arXiv:1812.06162). Batches are in whatever unit their noise is measured in: sequences or
tokens. On the hyperbola (S/S_min - 1)(E/E_min - 1) = 1 "critical" has several meanings a factor 5 apart: half of
the steps' and half of the samples' efficiency at B = B_crit, 20 % more samples than the least at 0.2 B_crit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GradientNoise:
    """Estimates of a gradient's squared norm and of the trace of its per-sample covariance."""

    signal: float  # |G|^2
    noise: float  # tr(Sigma)

    @property
    def scale(self) -> float:
        """B_simple = tr(Sigma) / |G|^2; infinite where the signal's estimate is not positive."""
        return self.noise / self.signal if self.signal > 0 else math.inf


def estimate_noise(
    small_norm_squared: float, big_norm_squared: float, small_batch: float, big_batch: float
) -> GradientNoise:
    """Unbiased estimates from gradients of two batch sizes (McCandlish 2018, appendix A.1).

    In data parallelism the small ones are the ranks' gradients before the all-reduce (their squared norms averaged),
    the big one is the gradient after it. A single estimate is noisy and may be negative: average both parts over
    steps, then divide (:class:`NoiseAverage`).

    Raises:
        ValueError: the small batch is not smaller, or not positive.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"small_batch={small_batch}: must be above 0 and below big_batch={big_batch}")
    signal = (big_batch * big_norm_squared - small_batch * small_norm_squared) / (big_batch - small_batch)
    noise = (small_norm_squared - big_norm_squared) / (1 / small_batch - 1 / big_batch)
    return GradientNoise(signal, noise)


@dataclass
class NoiseAverage:
    """Exponential moving averages of signal and noise, each on its own, without the bias of their zero start."""

    decay: float = 0.99
    steps: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay}: must be in [0, 1)")

    def update(self, estimate: GradientNoise) -> GradientNoise:
        """The averages after one more step."""
        self.steps += 1
        values = (estimate.signal, estimate.noise)
        self.sums = [self.decay * s + (1 - self.decay) * value for s, value in zip(self.sums, values, strict=True)]
        weight = 1 - self.decay**self.steps
        return GradientNoise(self.sums[0] / weight, self.sums[1] / weight)


def steps_ratio(batch: float, critical_batch: float) -> float:
    """S / S_min = 1 + B_crit / B: updates to a loss, over the fewest possible (McCandlish 2018, equation 2.11)."""
    check_batches(batch, critical_batch)
    return 1 + critical_batch / batch


def samples_ratio(batch: float, critical_batch: float) -> float:
    """E / E_min = 1 + B / B_crit: samples to a loss, over the fewest possible."""
    check_batches(batch, critical_batch)
    return 1 + batch / critical_batch


def sample_efficiency(batch: float, critical_batch: float) -> float:
    """1 / (1 + B / B_crit): progress per sample, relative to tiny batches."""
    return 1 / samples_ratio(batch, critical_batch)


def batch_of_efficiency(efficiency: float, critical_batch: float) -> float:
    """The batch that has this sample efficiency; B_crit itself for one half.

    Raises:
        ValueError: efficiency outside (0, 1).
    """
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency={efficiency}: must be between 0 and 1")
    return critical_batch * (1 / efficiency - 1)


def batch_of_overhead(overhead: float, critical_batch: float) -> float:
    """The batch that takes this share of samples more than tiny batches: 0.2 B_crit for 20 %."""
    if not overhead > 0:
        raise ValueError(f"overhead={overhead}: must be above 0")
    return overhead * critical_batch


def critical_batch_of(fewest_samples: float, fewest_steps: float) -> float:
    """B_crit = E_min / S_min."""
    return fewest_samples / fewest_steps


def critical_batch_at_loss(loss: float, scale: float = 2.0e8, exponent: float = 4.76) -> float:
    """Critical batch in tokens at a training loss in nats: scale x loss^-exponent.

    Kaplan et al. 2020 (arXiv:2001.08361, equation 1.4); at models below 10 M parameters a reproduction found
    2.2e7 and 4.26 (github.com/shehper/scaling_laws).

    Raises:
        ValueError: a loss that is not positive.
    """
    if not loss > 0:
        raise ValueError(f"loss={loss}: must be above 0")
    return scale * loss**-exponent


def optimal_batch_multiplier(data_ratio: float, exponent: float = 0.383) -> float:
    """How the optimal batch grows with the tokens trained on: ratio^0.383 (Bergsma et al. 2025, arXiv:2505.13738).

    Raises:
        ValueError: a ratio that is not positive.
    """
    if not data_ratio > 0:
        raise ValueError(f"data_ratio={data_ratio}: must be above 0")
    return data_ratio**exponent


def check_batches(batch: float, critical_batch: float) -> None:
    if not (batch > 0 and critical_batch > 0):
        raise ValueError(f"batch={batch}, critical_batch={critical_batch}: must be above 0")
