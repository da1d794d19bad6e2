import pytest

from harness import traffic
from tests.cases import cases, check


def sent(collectives, ranks):
    return traffic.sent_per_rank(collectives, ranks)


@pytest.mark.parametrize("case", [c for c in cases("comm") if c.id.startswith(("comm-vol", "ds-comm"))])
def test_each_rank_sends_as_many_elements_as_derived(case):
    ranks, micro_steps = case["input"]["N"], case["input"].get("G", 1)

    def deepspeed(stage, **options):
        return sent(traffic.deepspeed_collectives(stage, 1, micro_steps, **options), ranks)

    actual = {
        "ddp": sent(traffic.ddp_collectives(1), ranks),
        "zero1_paper": sent(traffic.paper_collectives(1, 1), ranks),
        "zero2_paper": sent(traffic.paper_collectives(2, 1), ranks),
        "zero3": sent(traffic.paper_collectives(3, 1), ranks),
        "ds_zero12_default_allreduce": deepspeed(1),
        "s0": deepspeed(0),
        "s1_default": deepspeed(1),
        "s1_off": deepspeed(1, multi_rank_allreduce=False),
        "s2_default": deepspeed(2),
        "s2_off": deepspeed(2, multi_rank_allreduce=False),
        "s3": deepspeed(3),
    }
    check(actual, case)


def test_stage_2_without_accumulation_sends_what_stage_1_does():
    for option in (True, False):
        volumes = [sent(traffic.deepspeed_collectives(stage, 7e9, multi_rank_allreduce=option), 64) for stage in (1, 2)]
        assert volumes[0] == volumes[1]


def test_a_logger_counts_only_a_ranks_own_part_of_an_all_gather():
    default = traffic.input_per_operation(traffic.deepspeed_collectives(1, 1000, param_bytes=2, grad_bytes=4), 2)
    assert default == {"all_reduce": 4000, "all_gather": 1000}
    off = traffic.input_per_operation(traffic.deepspeed_collectives(2, 1000, 4, multi_rank_allreduce=False), 2)
    assert off == {"reduce": 4000, "all_gather": 500}


def test_persistent_and_kept_parameters_spare_gathers():
    whole = traffic.deepspeed_collectives(3, 1000, 4)
    assert [c.payload for c in whole] == [4000, 8000]
    assert traffic.deepspeed_collectives(3, 1000, 4, persistent_params=100)[1].payload == 8 * 900 + 100
    assert traffic.deepspeed_collectives(3, 1000, 4, regather=False)[1].payload == 4000
    assert sent(traffic.fsdp_collectives(1000, 4), 8) == sent(whole, 8)


def test_one_rank_sends_nothing():
    assert all(sent(traffic.deepspeed_collectives(stage, 1e9), 1) == 0 for stage in range(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traffic.deepspeed_collectives(5, 10), "zero.stage=5"),
        (lambda: traffic.deepspeed_collectives(2, 10, 0), "grad_accum_steps=0"),
        (lambda: traffic.deepspeed_collectives(3, 10, persistent_params=11), "persistent_params=11"),
        (lambda: traffic.ring_factor("all_to_all", 8), "operation=all_to_all"),
    ],
)
def test_impossible_traffic_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
