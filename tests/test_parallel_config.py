"""The `parallel` group: what can be chosen, what is refused in one line, and how it is resolved."""

import pytest

from harness.config import AsyncConfig, ConfigError, SyncConfig, dump, load
from harness.staleness import AsyncSchedule, SyncSchedule, build_schedule
from tests.worlds import compose


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.workers=4", "parallel.backup_workers=1", "parallel.speeds=[1,1,1,1,0.5]"),
        ("+exp=async",),
        ("+exp=async", "parallel.remedy=dc_asgd", "parallel.dc_adaptive=true", "parallel.max_staleness=2"),
        ("parallel=async", "parallel.gradients_per_update=8", "parallel.lr_mode=match_sync", "parallel.drain=drop"),
    ],
)
def test_config_survives_dump_and_load(overrides):
    config = compose(*overrides, world_size=2)
    assert load(dump(config)) == config


def test_sync_has_one_worker_per_rank_and_async_its_own():
    sync = compose(world_size=4).parallel
    assert isinstance(sync, SyncConfig) and sync.workers == 4
    assert isinstance(build_schedule(sync, 32, 0), SyncSchedule)
    async_ = compose("+exp=async", world_size=2).parallel
    assert isinstance(async_, AsyncConfig) and async_.workers == 8
    assert isinstance(build_schedule(async_, 32, 0), AsyncSchedule)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("parallel.workers=0", "parallel.workers=0: must be a finite number of at least 1"),
        ("parallel.clock=gamma", "parallel.clock=gamma: choose one of constant, lognormal, exponential"),
        ("parallel.clock_cv=-0.1", "parallel.clock_cv=-0.1: must be a finite number of at least 0"),
        ("parallel.clock_cv=nan", "parallel.clock_cv=nan: must be a finite number"),
        ("parallel.clock=stragglers parallel.clock_cv=3", "parallel.clock_cv=3.0: must be below 3"),
        ("parallel.clock_mean_s=0", "parallel.clock_mean_s=0.0: must be a finite number above 0"),
        ("parallel.speeds=[1,2]", "parallel.speeds=[1.0, 2.0]: needs one speed for each of 8 workers, or none"),
        ("parallel.speeds=[1,1,1,1,1,1,1,0]", "must be finite numbers above 0"),
        ("parallel.max_staleness=-1", "parallel.max_staleness=-1: must be a finite number of at least 0"),
        ("parallel.remedy=hope", "parallel.remedy=hope: choose one of none, lr_over_staleness, dc_asgd"),
        ("parallel.dc_lambda=-1", "parallel.dc_lambda=-1.0: must be"),
        ("parallel.dc_decay=1", "parallel.dc_decay=1.0: must be in [0, 1)"),
        ("parallel.lr_mode=fast", "parallel.lr_mode=fast: choose one of per_update, match_sync"),
        ("parallel.gradients_per_update=0", "parallel.gradients_per_update=0: must be"),
        ("parallel.gradients_per_update=9", "parallel.gradients_per_update=9: must be at most parallel.workers=8"),
        ("parallel.drain=leak", "parallel.drain=leak: choose one of apply, drop"),
        ("parallel.pending_device=disk", "parallel.pending_device=disk: choose one of same, cpu"),
        ("precision=fp16", "precision=fp16: a pending gradient would outlive its loss scale under parallel=async"),
        ("parallel.clock=trace", "parallel.trace: parallel.clock=trace needs parallel.trace=FILE.csv"),
        ("parallel.trace=times.csv", "parallel.trace=times.csv: needs parallel.clock=trace, not lognormal"),
    ],
)
def test_mistake_is_told_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as error:
        compose("+exp=async", *overrides.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_backup_workers_need_speeds_too():
    with pytest.raises(ConfigError, match="needs one speed for each of 5 workers"):
        compose("parallel.workers=4", "parallel.backup_workers=1", "parallel.speeds=[1,1,1,1]")
    with pytest.raises(ConfigError, match=r"parallel\.backup_workers=-1"):
        compose("parallel.backup_workers=-1")


def test_sync_workers_must_share_the_batch_evenly():
    message = r"parallel\.workers=5: does not divide batch\.global_size=32; nearest valid size: 30 or 35"
    with pytest.raises(ConfigError, match=message):
        compose("parallel.workers=5")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has too few times: none"),
        ("seconds\n", "has too few times: none"),
        ("0.5\n0.6\n0.7\n", "has too few times, 3; needs at least one for each of 4 workers"),
        ("0.5\n-0.1\n0.2\n0.3\n", "time '-0.1' must be a finite number of seconds above 0"),
        ("0.5\nnan\n0.2\n0.3\n", "time 'nan' must be a finite number of seconds above 0"),
        ("0.5\nsoon\n0.2\n0.3\n", "time 'soon' must be a finite number of seconds above 0"),
        ("1,2\n3\n", "needs the same number of columns in every line"),
        ("1,2,3\n1,2,3\n", "has 3 columns; needs 1, or one for each of 4 workers"),
        (None, "cannot be read"),
    ],
)
def test_bad_trace_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "times.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        compose("parallel=async", "parallel.workers=4", "parallel.clock=trace", f"parallel.trace={path}")
    assert f"parallel.trace={path}: " in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_trace_gives_the_times(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("worker 0,worker 1\n0.5, 1\n0.25, 2\n")
    config = compose("parallel.workers=2", "parallel.clock=trace", f"parallel.trace={path}")
    schedule = build_schedule(config.parallel, 32, seed=0)
    assert [schedule.advance()[0].time_s for _ in range(2)] == [16, 48]
