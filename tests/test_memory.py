import pytest

from harness import memory
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("memory"))
def test_memory_is_as_published(case):
    given = case["input"]
    if "bytes_per_param" in given:
        actual = {"GB": memory.unsharded_bytes(given["params"], given["bytes_per_param"]) / 1e9}
    elif "reduce_bucket_size" in given:
        bucket = memory.ipg_bucket_bytes(
            given["reduce_bucket_size"], given["bytes"], given["n_buffers"] == 2, given["n_buffers"] > 0
        )
        predicted = given["base_MiB"] + bucket / 2**20
        actual = {"pred_MiB": predicted, "measured_MiB": predicted}
    else:
        parts = {
            "param_bytes": given.get("p", 2),
            "grad_bytes": given.get("g", 2),
            "optimizer_bytes": given.get("K", 12),
        }
        actual = {"GB": memory.zero_bytes(given["params"], given["stage"], given["dp"], **parts).total / 1e9}
    check(actual, case)


@pytest.mark.parametrize(
    ("convention", "by_stage"),
    [
        ("paper", {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}),
        ("fp32", {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}),
        ("no-master", {0: (12, 0), 1: (4, 8), 2: (2, 10), 3: (0, 12)}),
        ("ultrascale-fp32-grad", {0: (20, 0), 1: (8, 12), 2: (2, 18), 3: (0, 20)}),
        ("ml-engineering", {0: (18, 0)}),
        ("deepspeed-estimator", {2: (2, 18), 3: (0, 18)}),
        ("deepspeed-autotuner", {0: (20, 0), 1: (4, 16), 2: (2, 18), 3: (0, 20)}),
        ("eleuther", {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)}),
        ("llm-analysis", {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)}),
        ("fsdp2", {3: (0, 16)}),
    ],
)
def test_each_convention_replicates_and_shards_its_own_bytes_per_parameter(convention, by_stage):
    params, ranks = 10**9, 8
    for stage, (replicated, sharded) in by_stage.items():
        states = memory.model_state_bytes(params, stage, ranks, convention)
        assert states.param + states.grad + states.optimizer == params * (replicated + sharded / ranks)
    for stage in set(memory.STAGES) - set(by_stage):
        with pytest.raises(ValueError, match="defines only"):
            memory.model_state_bytes(params, stage, ranks, convention)


def test_gathered_layers_and_buffers_do_not_shrink_with_the_ranks():
    wide = [memory.model_state_bytes(10**9, 3, n, "deepspeed-estimator", largest_layer_params=10**7) for n in (8, 4096)]
    assert [states.buffer for states in wide] == [4e7, 4e7]
    assert memory.model_state_bytes(10**9, 3, 8, "eleuther").buffer == 3e9
    assert memory.model_state_bytes(10**9, 3, 1, "eleuther").buffer == 0


def test_flat_groups_are_padded_to_twice_the_ranks():
    assert [memory.padded_params(1001, n) for n in (1, 2, 4)] == [1002, 1004, 1008]
    assert memory.padded_params(1008, 4) == 1008


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.zero_bytes(1e9, 4, 8), "zero.stage=4"),
        (lambda: memory.zero_bytes(1e9, 1, 0), "world_size=0"),
        (lambda: memory.zero_bytes(0, 1, 8), "params=0"),
        (lambda: memory.model_state_bytes(1e9, 1, 8, "paper16"), "choose one of .*paper"),
    ],
)
def test_impossible_inputs_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
