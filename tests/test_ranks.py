"""What a rank raises becomes a status and one line."""

import pytest
import torch

from harness.config import ConfigError
from harness.ranks import Diverged, ToldToStop, describe


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("injected\n  twice"), "failed", "RuntimeError: injected twice (test_ranks.py:30)"),
        (ConfigError("lr.base=0: a rate"), "failed", "lr.base=0: a rate"),
        (Diverged("the loss is nan"), "diverged", "the loss is nan"),
        (ToldToStop("received SIGTERM"), "killed", "received SIGTERM"),
        (torch.OutOfMemoryError("1 GiB"), "oom", "OutOfMemoryError: 1 GiB"),
        (MemoryError("1 GiB"), "oom", "MemoryError: 1 GiB"),
        (RuntimeError("CUDA out of memory"), "oom", "RuntimeError: CUDA out of memory"),
        (ValueError("x" * 1000), "failed", f"ValueError: {'x' * 500} (test_ranks.py:30)"),
    ],
)
def test_an_error_is_described_in_one_line(error, status, reason):
    with pytest.raises(type(error)) as raised:
        raise_here(error)
    assert describe(raised.value) == (status, reason)


def raise_here(error):
    raise error
