"""The feed: what it hands out is what the data says, whether built ahead or not."""

import pytest
import torch

from harness.config import total_steps
from harness.data import Data, open_data
from harness.feed import Feed
from harness.hf_config import check_limits
from tests.worlds import compose


class OneRank:
    rank, size = 0, 1
    device = torch.device("cpu")


def build_ahead(feed: Feed) -> Feed:
    """What a GPU's feed does, without a GPU: pinned memory and devices are torch's business."""
    feed._ahead = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(feed._built, "put", feed._built.queue.append)  # all of them, before the first is asked for
        feed._build_ahead()
    return feed


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_feed_hands_out_the_updates_of_the_data_in_order(ahead, first):
    config = compose("data=synthetic", "data.ragged=true", "batch.micro_size=8", "train.steps=5")
    data = open_data(config, check_limits(config))
    feed = Feed(config, OneRank(), data, first)
    if ahead:
        build_ahead(feed)
    for step in range(first, total_steps(config)):
        targets, batches = data.update_batches(step, 32, 8, 0, 1)
        fed_targets, fed = feed.update(step)
        assert fed_targets.item() == targets
        pairs = list(zip(batches, fed, strict=True))
        assert len(pairs) == 4
        for (ids, labels), (fed_ids, fed_labels) in pairs:
            assert torch.equal(ids, fed_ids) and torch.equal(labels, fed_labels)


def test_an_error_in_building_ahead_reaches_training():
    config = compose("data=synthetic", "train.steps=2")
    feed = Feed(config, OneRank(), Data(None, 0, 128), 0)
    with pytest.raises(AttributeError):
        build_ahead(feed).update(0)
