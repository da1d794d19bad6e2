"""What DeepSpeed makes the host wait for, without a GPU: stand-ins for its streams say who waits for whom."""

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import stage3, stage_1_and_2

from harness.engines.deepspeed import host_ahead


class Stream:
    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_stream(self, other):
        self.waits.append((self.name, other.name))

    def synchronize(self):
        raise AssertionError("the host waited")


@pytest.mark.parametrize(
    ("module", "kind"),
    [(stage_1_and_2, stage_1_and_2.DeepSpeedZeroOptimizer), (stage3, stage3.DeepSpeedZeroOptimizer_Stage3)],
)
def test_streams_wait_for_one_another_and_not_the_host(module, kind, monkeypatch):
    waits: list[tuple[str, str]] = []
    computing, exchange = Stream("computing", waits), Stream("exchange", waits)
    accelerator = deepspeed.get_accelerator()
    monkeypatch.setattr(accelerator, "current_stream", lambda: computing)
    before = accelerator.synchronize
    both = [("exchange", "computing"), ("computing", "exchange")]
    with host_ahead(kind.__new__(kind), exchange):
        deepspeed.get_accelerator().synchronize()
        assert waits == both
        exchange.synchronize()
        assert waits == 2 * both
        assert module.is_invalid_grad_norm(torch.tensor(float("nan"))) is False  # no look at the device
    assert accelerator.synchronize == before
    assert module.is_invalid_grad_norm(torch.tensor(float("nan"))) is True
    with pytest.raises(AssertionError):
        exchange.synchronize()
