"""The event simulation: who arrives when, with which staleness, and what the clock says."""

import json
from collections import Counter

import pytest

from harness.clock import Clock
from harness.config import AsyncConfig, SyncConfig
from harness.staleness import (
    Arrival,
    AsyncSchedule,
    SyncSchedule,
    WeightUpdate,
    build_schedule,
    rate_factor,
    staleness_bound,
    total_staleness,
)
from tests.parameter_server import LAWS, clock_of


def run(schedule: AsyncSchedule, gradients: int, drain: bool = True) -> list[Arrival]:
    return [a for k in range(gradients) for a in schedule.advance(last=drain and k == gradients - 1)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("workers, gradients", [(1, 20), (2, 21), (4, 50), (5, 50), (7, 7), (8, 3)])
def test_staleness_sums_to_the_same_integer_for_every_law(law, workers, gradients):
    schedule = AsyncSchedule(clock_of(law, workers), workers, 8)
    arrivals = run(schedule, gradients)
    total = sum(a.staleness for a in arrivals)
    assert total == total_staleness(workers, gradients)
    if gradients >= workers:
        assert 2 * total == (workers - 1) * (2 * gradients - workers)
    assert sorted(a.gradient for a in arrivals) == list(range(gradients))
    tally = schedule.tally
    assert (tally.applied, tally.updates, tally.dropped, tally.pending) == (gradients, gradients, 0, 0)
    assert tally.staleness_mean == total / gradients


@pytest.mark.parametrize("workers, expected", [(2, 1), (4, 3), (8, 7), (16, 15)])
@pytest.mark.parametrize("law", ["exponential", "lognormal", "speeds"])
def test_mean_staleness_is_one_less_than_the_workers(workers, expected, law):
    schedule = AsyncSchedule(clock_of(law, workers), workers, 1)
    run(schedule, 8000)
    assert schedule.tally.staleness_mean == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("workers, p0, variance", [(2, 0.5, 2), (4, 0.25, 12)])
def test_exponential_staleness_is_geometric(workers, p0, variance):
    schedule = AsyncSchedule(Clock("exponential"), workers, 1)
    run(schedule, 60_000)
    tally = schedule.tally
    mean = tally.staleness_mean
    assert tally.staleness_counts[0] / tally.applied == pytest.approx(p0, rel=0.03)
    spread = sum(n * (s - mean) ** 2 for s, n in tally.staleness_counts.items()) / tally.applied
    assert spread == pytest.approx(variance, rel=0.03)


def test_slow_workers_are_staler():
    schedule = AsyncSchedule(Clock("lognormal", cv=0.25, speeds=(1, 1, 1, 0.25)), 4, 1)
    arrivals = run(schedule, 30_000)
    counts = Counter(a.worker for a in arrivals)
    means = [sum(a.staleness for a in arrivals if a.worker == w) / counts[w] for w in range(4)]
    assert means == pytest.approx([2.25, 2.25, 2.25, 12.0], rel=0.02)
    assert schedule.tally.staleness_mean == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("n, expected", [(1, 29 / 30), (15, 14.5), (30, 29.0)])
def test_softsync_staleness_as_in_zhang_2015(n, expected):
    mean, beyond = {}, {}
    for law in ("lognormal", "exponential"):
        schedule = AsyncSchedule(Clock(law, cv=0.1), 30, 1, gradients_per_update=30 // n)
        run(schedule, 48_000)
        counts = schedule.tally.staleness_counts
        mean[law] = schedule.tally.staleness_mean
        beyond[law] = sum(c for s, c in counts.items() if s > 2 * n) / schedule.tally.applied
    assert list(mean.values()) == pytest.approx([expected, expected], abs=0.01)
    assert beyond["lognormal"] < 1e-4  # what the paper reports
    assert n == 1 or 0.08 < beyond["exponential"] < 0.14  # which rules out exponential times


def test_unbounded_workers_pull_one_at_each_version():
    schedule = AsyncSchedule(clock_of("exponential", 4), 4, 1)
    arrivals = [schedule.advance() for _ in range(200)]
    assert [len(a) for a in arrivals] == [0, 0, 0] + [1] * 197
    assert schedule.tally.pending == 3


def test_constant_clock_has_constant_staleness():
    arrivals = run(AsyncSchedule(clock_of("constant", 4), 4, 1), 40)
    assert [a.staleness for a in arrivals] == [0, 1, 2] + [3] * 37
    assert [a.gradient for a in arrivals] == list(range(40))


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("law", ["exponential", "speeds"])
def test_bounded_workers_wait_for_the_slowest(bound, law):
    workers, gradients = 4, 2000
    schedule = AsyncSchedule(clock_of(law, workers), workers, 1, max_staleness=bound)
    steps = [schedule.advance(last=k == gradients - 1) for k in range(gradients)]
    worker_of = {a.gradient: a.worker for step in steps for a in step}
    pushed = [0] * workers
    leads = []
    for k, step in enumerate(steps):
        leads.append(pushed[worker_of[k]] - min(pushed))  # at the pull of gradient k
        for arrival in step:
            pushed[arrival.worker] += 1
    assert max(leads) == bound
    assert max(schedule.tally.staleness_counts) <= staleness_bound(workers, bound)
    assert max(len(step) for step in steps[:-1]) > 1  # a wait lets several arrive
    assert sum(not step for step in steps) > workers  # and several pull at one version
    free = AsyncSchedule(clock_of(law, workers), workers, 1)
    run(free, gradients)
    assert schedule.tally.now_s > free.tally.now_s


def test_bound_of_zero_is_a_barrier():
    schedule = AsyncSchedule(clock_of("exponential", 4), 4, 1, max_staleness=0)
    assert [len(schedule.advance()) for _ in range(12)] == [0, 0, 0, 4] * 3


def test_worker_pulls_in_the_middle_of_a_group():
    schedule = AsyncSchedule(clock_of("constant", 4), 4, 1, gradients_per_update=3)
    arrivals = [schedule.advance() for _ in range(12)]
    assert [len(a) for a in arrivals] == [0, 0, 0] + [1] * 9
    assert [a.update is not None for step in arrivals for a in step] == [False, False, True] * 3


def test_short_last_group_is_applied_when_drained():
    schedule = AsyncSchedule(clock_of("exponential", 4), 4, 1, gradients_per_update=3)
    updates = [a.update for a in run(schedule, 50) if a.update is not None]
    assert [len(u.staleness) for u in updates] == [3] * 16 + [2]
    assert [u.applied for u in updates] == list(range(0, 51, 3))
    assert schedule.tally.applied == 50


@pytest.mark.parametrize("per_update", [1, 3])
def test_dropped_gradients_are_counted(per_update):
    schedule = AsyncSchedule(clock_of("exponential", 4), 4, 1, gradients_per_update=per_update, drain="drop")
    run(schedule, 50)
    tally = schedule.tally
    assert tally.applied == 47 // per_update * per_update
    assert (tally.computed, tally.dropped, tally.pending) == (50, 50 - tally.applied, 0)


@pytest.mark.parametrize("law", LAWS)
def test_asynchronous_rate_is_that_of_the_workers(law):
    workers = 4
    clock = clock_of(law, workers)
    schedule = AsyncSchedule(clock, workers, 8)
    last = run(schedule, 2000)[-1]
    per_worker = Counter(a.worker for a in run(AsyncSchedule(clock, workers, 8), 2000))
    busy = [sum(clock.seconds(w, k, 8) for k in range(n)) for w, n in per_worker.items()]
    assert max(busy) == pytest.approx(last.time_s)  # nobody ever waits


@pytest.mark.parametrize("drain", ["apply", "drop"])
def test_training_can_go_on_after_a_drain(drain):
    schedule = AsyncSchedule(clock_of("lognormal", 4), 4, 1, drain=drain)
    run(schedule, 20)
    assert [len(schedule.advance()) for _ in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("at", [0, 2, 23])
def test_schedule_goes_on_from_its_state(at):
    def build() -> AsyncSchedule:
        return AsyncSchedule(clock_of("exponential", 4), 4, 1, gradients_per_update=3, max_staleness=2)

    whole = build()
    expected = [whole.advance(last=k == 49) for k in range(50)]
    first, second = build(), build()
    assert [first.advance() for _ in range(at)] == expected[:at]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.advance(last=k == 49) for k in range(at, 50)] == expected[at:]
    assert second.tally == whole.tally


def test_state_of_other_workers_is_refused():
    state = AsyncSchedule(Clock(), 4, 1).state_dict()
    with pytest.raises(ValueError, match=r"parallel\.workers=8: the checkpoint has 4 workers"):
        AsyncSchedule(Clock(), 8, 1).load_state_dict(state)


def test_times_depend_on_seed_worker_and_gradient_only():
    clock = Clock("lognormal", mean_s=0.01, cv=0.25, seed=3)
    assert clock.seconds(2, 17, 32) == clock.seconds(2, 17, 32) == 2 * clock.seconds(2, 17, 16)
    times = {Clock("lognormal", seed=s).seconds(w, k, 1) for s in range(3) for w in range(3) for k in range(3)}
    assert len(times) == 27


@pytest.mark.parametrize("law, cv", [("lognormal", 0.1), ("lognormal", 1.0), ("stragglers", 1.0), ("exponential", 1.0)])
def test_times_have_the_mean_and_spread_of_their_law(law, cv):
    clock = Clock(law, mean_s=0.02, cv=cv)
    times = [clock.seconds(0, k, 10) / 0.2 for k in range(40_000)]
    mean = sum(times) / len(times)
    spread = (sum((t - mean) ** 2 for t in times) / len(times)) ** 0.5
    assert mean == pytest.approx(1, rel=0.015)
    assert spread == pytest.approx(cv, rel=0.04)


def test_trace_is_replayed():
    own = Clock("trace", trace=((1.0, 2.0), (3.0, 5.0)), speeds=(1, 2))
    assert [own.seconds(w, k, 2) for w in (0, 1) for k in range(3)] == [2, 4, 2, 3, 5, 3]
    scaled = Clock("trace", trace=((1.0, 2.0), (3.0, 5.0)), mean_s=0.55)
    assert scaled.seconds(1, 1, 1) == pytest.approx(1.0)
    times = tuple(float(t) for t in range(1, 101))
    shared = Clock("trace", trace=(times,))
    starts = [shared.seconds(w, 0, 1) for w in range(8)]
    assert len(set(starts)) > 4 and {shared.seconds(3, k, 1) for k in range(100)} == set(times)
    assert [shared.seconds(w, 1, 1) % 100 for w in range(8)] == [(start + 1) % 100 for start in starts]


def test_sync_waits_for_the_slowest_worker():
    schedule = build_schedule(SyncConfig(kind="sync", workers=4, clock="exponential", clock_mean_s=0.01), 32, seed=5)
    assert isinstance(schedule, SyncSchedule)
    clock = Clock("exponential", mean_s=0.01, seed=5)
    expected = 0.0
    for k in range(20):
        (arrival,) = schedule.advance()
        expected += max(clock.seconds(w, k, 8) for w in range(4))
        assert arrival == Arrival(k, -1, 0, expected, WeightUpdate((0,), k))
    assert schedule.tally.staleness_mean == 0


def test_backup_workers_cut_the_tail_and_lose_nothing():
    config = SyncConfig(kind="sync", workers=4, backup_workers=2, clock="exponential", clock_mean_s=0.01)
    schedule = build_schedule(config, 32, seed=5)
    clock = Clock("exponential", mean_s=0.01, seed=5)
    for _ in range(20):
        schedule.advance()
    expected = sum(sorted(clock.seconds(w, k, 8) for w in range(6))[3] for k in range(20))
    assert schedule.tally.now_s == pytest.approx(expected)
    assert (schedule.tally.applied, schedule.tally.dropped) == (20, 0)


def test_sync_schedule_goes_on_from_its_state():
    first, second = (SyncSchedule(Clock("exponential"), 4, 1) for _ in range(2))
    first.advance()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.advance() == second.advance()


def test_one_asynchronous_gradient_is_a_whole_batch_of_one_worker():
    schedule = build_schedule(AsyncConfig(kind="async", workers=1, clock="constant", clock_mean_s=0.01), 32, seed=0)
    assert schedule.advance() == (Arrival(0, 0, 0, 0.32, WeightUpdate((0,), 0)),)


def test_rate_factors():
    single, group = WeightUpdate((4,), 0), WeightUpdate((0, 1, 5), 4)
    assert [rate_factor(u) for u in (single, group)] == [1, 1]
    assert [rate_factor(u, remedy="lr_over_staleness") for u in (single, group)] == [0.25, 0.5]
    assert rate_factor(WeightUpdate((0,), 0), remedy="lr_over_staleness") == 1
    assert [rate_factor(u, lr_mode="match_sync") for u in (single, group)] == [1, 3]
    assert rate_factor(group, "lr_over_staleness", "match_sync") == 1.5
