import pytest

from harness import collective, scaling
from tests.cases import cases, check

# Bus bandwidth in GB/s of an all-reduce on 8 x H200, 32 KiB to 16 GiB in powers of two
# (ml-engineering, network/README.md, all_reduce_bench).
H200_GBPS = [1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89]
H200_GBPS += [275.84, 346.51, 401.93, 436.15, 450.29, 463.58, 469.17, 473.10, 477.45, 482.26]
H200_SIZES = tuple(2.0 ** (15 + i) for i in range(20))
H200_SECONDS = tuple(
    collective.time_at_busbw("all_reduce", size, rate * 1e9, 8)
    for size, rate in zip(H200_SIZES, H200_GBPS, strict=True)
)
H200 = collective.CollectiveTable("all_reduce", 8, H200_SIZES, H200_SECONDS)


@pytest.mark.parametrize("case", [c for c in cases("comm") if not c.id.startswith(("comm-vol", "ds-comm"))])
def test_collectives_take_as_long_as_published(case):
    check(times(case["id"], case["input"], case["expected"]), case)


def times(name, given, expected):
    if name.startswith("comm-"):
        size = given["params"] * given["bytes"]
        return {"s": collective.ring_time("all_reduce", size, given["N"], given["GBps"] * 1e9)}
    if name.startswith("nccl-busbw"):
        names = {"allreduce": "all_reduce"}
        return {key: collective.busbw_factor(names.get(key, key), given["n"]) for key in expected}
    if name == "h200-nvls-vs-ring":

        def seconds(operation, rate):
            return collective.time_at_busbw(operation, 2**34, rate, given["n"])

        scattered = seconds("reduce_scatter", expected["rs"]) + seconds("all_gather", expected["ag"])
        return {**expected, "rs_plus_ag_over_ar_nvls": scattered / seconds("all_reduce", expected["ar_nvls"])}
    if name == "h200-alphabeta":
        fit = H200.fit()
        return {"alpha_us": fit.latency * 1e6, "B_GBps": fit.bandwidth / 1e9, "max_rel_err": fit.max_relative_error}
    if name.startswith("ddp-pipeline"):
        return {"t_ms": [scaling.ddp_backward_time(given["K"], given["b_ms"], c) for c in given["c_ms"]]}
    raise AssertionError(f"no time for {name}")


def test_a_table_returns_its_own_times_and_says_where_it_ends():
    assert all(H200.time(s) == pytest.approx(t) for s, t in zip(H200_SIZES, H200_SECONDS, strict=True))
    assert not H200.covers(2**14) and H200.covers(2**15) and H200.covers(3e6) and not H200.covers(2**35)
    assert H200.time(1) == H200_SECONDS[0] and H200.time(0) == 0
    assert H200.time(2**35) == pytest.approx(2 * H200_SECONDS[-1])
    assert H200_SECONDS[10] < H200.time(1.5 * 2**25) < H200_SECONDS[11]


def test_a_fit_recovers_latency_and_bandwidth_of_exact_times():
    truth = collective.AlphaBeta("all_gather", 4, 2e-5, 30e9)
    sizes = [1e3, 1e5, 1e6, 1e8]
    fit = collective.fit_alpha_beta("all_gather", 4, sizes, [truth.time(size) for size in sizes])
    assert (fit.latency, fit.bandwidth) == (pytest.approx(2e-5, rel=1e-6), pytest.approx(30e9, rel=1e-6))
    assert fit.max_relative_error < 1e-6
    assert fit.at(13).latency == pytest.approx(4 * 2e-5)


def test_a_ring_pays_its_latency_at_every_hop():
    assert collective.ring_time("all_reduce", 0, 8, 1e9, 1e-6) == pytest.approx(14e-6)
    assert collective.ring_time("all_gather", 8e6, 8, 1e9, 1e-6) == pytest.approx(7e-6 + 7e-3)
    assert collective.ring_time("reduce_scatter", 8e6, 1, 1e9, 1e-6) == 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1e3], [1.0]), ([1e3, 1e6], [1.0, 0.0]), ([1e3, 1e6], [2.0, 1.0]), ([1e3, 1e3], [1.0, 2.0])]
)
def test_times_that_say_nothing_are_not_fitted(sizes, seconds):
    with pytest.raises(ValueError, match="all_reduce: "):
        collective.fit_alpha_beta("all_reduce", 8, sizes, seconds)
