"""Times of updates and the rates that follow from them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


class StepClock:
    """Marks on the device's own time line, read only when asked for, so that no update waits for a mark.

    On a GPU a mark is an event on the current stream; without one the host's clock will do.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks; waits for the second."""
        if not self.on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def warmup_steps(steps: int) -> int:
    """Updates at the start that no rate counts: allocation, compilation and caches; at most half of all."""
    return min(5, steps // 2)


def rates(step_times_s: list[float], sequences: int, seq_len: int, world_size: int) -> dict[str, float]:
    """Throughput of a run.

    Args:
        step_times_s: of each update, on its slowest rank, without evaluation and logging between updates.
        sequences: of all ranks in one update, accumulation included.
        seq_len: tokens per sequence.

    Returns:
        tokens_per_s and samples_per_s of all ranks together over the time of the slowest, per rank, and the median
        and 90th percentile of the step time; warm-up excluded.
    """
    counted = sorted(step_times_s[warmup_steps(len(step_times_s)) :])
    samples_per_s = len(counted) * sequences / sum(counted)
    return {
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * seq_len,
        "tokens_per_s_per_rank": samples_per_s * seq_len / world_size,
        "step_time_s_median": statistics.median(counted),
        "step_time_s_p90": counted[min(len(counted) - 1, int(0.9 * len(counted)))],
    }
