"""Asynchronous training of real weights equals a parameter server with one weight copy per worker."""

import copy
import io
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.asynchrony import compensated_gradient, delayed_descent, stability_limit
from harness.clock import Clock
from harness.config import AsyncConfig, ConfigError
from harness.delayed import DelayedOptimizer, check_pending_memory
from harness.staleness import AsyncSchedule, expected_pending_bytes
from tests.parameter_server import (
    LAWS,
    SEQUENCES,
    NaiveServer,
    TokenModel,
    batch,
    build_model,
    clock_of,
    worst_distance,
)

GRADIENTS = 50
LR = 0.1
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR),
    "momentum": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(workers: int, **values) -> AsyncConfig:
    return AsyncConfig(kind="async", workers=workers, **values)


def delayed(inner, config: AsyncConfig, clock: Clock, rate=None) -> DelayedOptimizer:
    schedule = AsyncSchedule(
        clock, config.workers, SEQUENCES, config.gradients_per_update, config.max_staleness, config.drain
    )
    return DelayedOptimizer(inner, schedule, config, rate)


def train(model: TokenModel, optimizer: DelayedOptimizer, gradients=GRADIENTS, start=0, step=None, stop=None):
    """The loop an engine runs: gradient k at today's weights, then one step."""
    for k in range(start, gradients if stop is None else stop):
        for p in model.parameters():
            p.grad = None
        model(batch(k)).backward()
        optimizer.begin_update(last=k == gradients - 1)
        (step or optimizer.step)()


def emulate(kind: str, config: AsyncConfig, clock: Clock, rate=None) -> tuple[TokenModel, DelayedOptimizer]:
    model = build_model()
    optimizer = delayed(OPTIMIZERS[kind](list(model.parameters())), config, clock, rate)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("drain", ["apply", "drop"])
@pytest.mark.parametrize("per_update, bound", [(1, None), (3, None), (1, 1), (4, 0), (2, 2)])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_weights_equal_those_of_a_naive_server(kind, law, per_update, bound, drain):
    config = settings(5 if law == "trace" else 4, gradients_per_update=per_update, max_staleness=bound, drain=drain)
    clock = clock_of(law, config.workers)
    model, optimizer = emulate(kind, config, clock)
    naive = NaiveServer(clock, config.workers, GRADIENTS, OPTIMIZERS[kind], per_update, bound, drain).run()
    assert worst_distance(model, naive.model) < 1e-6
    tally = optimizer.schedule.tally
    assert (tally.updates, tally.applied, tally.now_s) == (naive.updates, naive.applied, naive.now)
    assert tally.staleness_counts == Counter(naive.staleness)
    assert worst_distance(model, build_model()) > 1e-2  # it trained at all


@pytest.mark.parametrize("per_update, bound", [(1, None), (3, None), (1, 1)])
@pytest.mark.parametrize("law", LAWS)
def test_adamw_weights_equal_those_of_a_naive_server(law, per_update, bound):
    """Bound 1e-6 too: both sides do the same arithmetic, so Adam has no rounding to amplify."""
    config = settings(5, gradients_per_update=per_update, max_staleness=bound)
    clock = clock_of(law, config.workers)
    model, _ = emulate("adamw", config, clock)
    naive = NaiveServer(clock, config.workers, GRADIENTS, OPTIMIZERS["adamw"], per_update, bound).run()
    assert worst_distance(model, naive.model) < 1e-6


@pytest.mark.parametrize("per_update, bound", [(1, None), (3, None), (1, 1)])
@pytest.mark.parametrize("lr_mode", ["per_update", "match_sync"])
def test_rate_over_staleness_equals_a_naive_server(per_update, bound, lr_mode):
    def rate(staleness, applied):
        mean = max(1.0, sum(staleness) / len(staleness))
        return LR / (1 + applied) ** 0.1 / mean * (len(staleness) if lr_mode == "match_sync" else 1)

    config = settings(
        4, remedy="lr_over_staleness", lr_mode=lr_mode, gradients_per_update=per_update, max_staleness=bound
    )
    clock = clock_of("exponential", 4)
    model, optimizer = emulate("momentum", config, clock, rate=lambda update: LR / (1 + update.applied) ** 0.1)
    naive = NaiveServer(clock, 4, GRADIENTS, OPTIMIZERS["momentum"], per_update, bound, rate=rate).run()
    assert worst_distance(model, naive.model) < 1e-6
    if per_update == 1:
        assert optimizer.param_groups[0]["lr"] == LR / GRADIENTS**0.1  # as scheduled, not as scaled


@pytest.mark.parametrize("per_update, bound", [(1, None), (3, None), (1, 1)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_delay_compensation_equals_a_naive_server(per_update, bound, adaptive):
    squares: list[torch.Tensor] = []

    def correct(gradients, now, pulled):
        strength = [2.0] * len(gradients)
        if adaptive:
            squares[:] = [0.95 * s + 0.05 * g * g for s, g in zip(squares or [0.0] * 99, gradients, strict=False)]
            strength = [2.0 / (s + 1e-7).sqrt() for s in squares]
        return [compensated_gradient(*each) for each in zip(gradients, now, pulled, strength, strict=True)]

    config = settings(
        4, remedy="dc_asgd", dc_lambda=2.0, dc_adaptive=adaptive, gradients_per_update=per_update, max_staleness=bound
    )
    clock = clock_of("exponential", 4)
    model, _ = emulate("momentum", config, clock)
    naive = NaiveServer(clock, 4, GRADIENTS, OPTIMIZERS["momentum"], per_update, bound, correct=correct).run()
    plain, _ = emulate("momentum", settings(4, gradients_per_update=per_update, max_staleness=bound), clock)
    assert worst_distance(model, naive.model) < 1e-6
    assert worst_distance(model, plain) > 1e-5  # the correction does something


def test_compensated_step_of_zheng_2016():
    w = nn.Parameter(torch.tensor([0.8], dtype=torch.float64))
    optimizer = delayed(
        torch.optim.SGD([w], lr=0.1), settings(2, remedy="dc_asgd", dc_lambda=0.04), clock_of("constant", 2)
    )
    for gradient, last in ((-2.0, False), (0.5, True)):  # the first moves w to 1.0, the second was computed at 0.8
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.begin_update(last)
        optimizer.step()
    assert w.item() == pytest.approx(0.9498, abs=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "remedy", [{}, {"remedy": "lr_over_staleness"}, {"remedy": "dc_asgd", "dc_adaptive": True}, {"max_staleness": 0}]
)
def test_one_worker_is_bit_identical_to_the_optimizer_alone(kind, remedy):
    model, optimizer = emulate(kind, settings(1, **remedy), clock_of("exponential", 1))
    alone = build_model()
    plain = OPTIMIZERS[kind](list(alone.parameters()))
    for k in range(GRADIENTS):
        plain.zero_grad()
        alone(batch(k)).backward()
        plain.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in plain.state[q].items():
            assert value is None or torch.equal(value, optimizer.state[p][name])
    if remedy.get("remedy") != "dc_asgd":
        assert optimizer.pending_gradient_bytes == 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("per_update", [1, 3])
@pytest.mark.parametrize("bound", [None, 1])
@pytest.mark.parametrize("drain", ["apply", "drop"])
def test_every_gradient_is_applied_exactly_once(law, per_update, bound, drain):
    """Gradient k is the k-th unit vector, so the weights count how often each was applied."""
    w = nn.Parameter(torch.zeros(GRADIENTS))
    config = settings(4, gradients_per_update=per_update, max_staleness=bound, drain=drain, lr_mode="match_sync")
    optimizer = delayed(torch.optim.SGD([w], lr=1.0), config, clock_of(law, 4))
    for k in range(GRADIENTS):
        w.grad = torch.eye(GRADIENTS)[k]
        optimizer.begin_update(last=k == GRADIENTS - 1)
        optimizer.step()
    counts = (-w.detach()).round(decimals=5).tolist()
    dropped = optimizer.schedule.tally.dropped
    assert Counter(counts) == Counter({1.0: GRADIENTS - dropped, 0.0: dropped})
    assert (dropped == 0) == (drain == "apply")
    assert optimizer.pending_gradient_bytes == 0


def test_filling_moves_nothing():
    model, calls = build_model(), []
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    optimizer = delayed(inner, settings(4), clock_of("exponential", 4))
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    inner.register_step_pre_hook(lambda *_: calls.append(2))
    train(model, optimizer, stop=3)
    assert not calls and not optimizer.state and optimizer.param_groups[0]["lr"] == 2e-3
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), build_model().parameters(), strict=True))
    train(model, optimizer, start=3, stop=5)
    assert calls == [1, 2] * 2
    assert all(state["step"] == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("staleness", [0, 1, 2, 7])
def test_constant_delay_on_a_quadratic_follows_its_recurrence(staleness):
    def descend(step: float, updates: int) -> list[float]:
        w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = delayed(torch.optim.SGD([w], lr=step), settings(staleness + 1), clock_of("constant", staleness + 1))
        path = [1.0]
        for _ in range(updates + staleness):
            w.grad = w.detach().clone()
            if optimizer.begin_update():
                optimizer.step()
                path.append(w.item())
            else:
                optimizer.step()
        return path

    limit = stability_limit(staleness)
    for factor in (0.5, 0.98, 1.02):
        path = descend(factor * limit, 800)
        assert path == pytest.approx(delayed_descent(factor * limit, staleness, 800), rel=1e-9, abs=1e-12)
    below, above = descend(0.98 * limit, 800), descend(1.02 * limit, 800)
    assert max(map(abs, below[-50:])) < 0.7 * max(map(abs, below[:50]))
    assert max(map(abs, above[-50:])) > 1.5 * max(map(abs, above[:50]))


@pytest.mark.parametrize("at", [2, 23, 49])
@pytest.mark.parametrize(
    "remedy",
    [
        {},
        {"gradients_per_update": 3, "max_staleness": 2},
        {"remedy": "dc_asgd", "dc_adaptive": True, "gradients_per_update": 3},
    ],
)
def test_training_goes_on_from_a_state_bit_for_bit(at, remedy):
    config, clock = settings(4, **remedy), clock_of("exponential", 4)
    whole, _ = emulate("adamw", config, clock)
    model = build_model()
    optimizer = delayed(OPTIMIZERS["adamw"](list(model.parameters())), config, clock)
    train(model, optimizer, stop=at)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = build_model()
    model.load_state_dict(saved["model"])
    optimizer = delayed(OPTIMIZERS["adamw"](list(model.parameters())), config, clock)
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, start=at)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("remedy", [{}, {"max_staleness": 1}, {"remedy": "dc_asgd", "gradients_per_update": 3}])
def test_stepping_sub_group_by_sub_group_gives_the_same(kind, remedy):
    config, clock = settings(4, **remedy), clock_of("exponential", 4)
    whole, _ = emulate(kind, config, clock)
    model = build_model()
    params = list(model.parameters())
    optimizer = delayed(OPTIMIZERS[kind](params), config, clock)

    def step_as_zero_3() -> None:
        for sub_group in (params[:2], params[2:3], params[3:]):
            optimizer.param_groups[0]["params"] = sub_group
            optimizer.step()
            optimizer.param_groups[0]["params"] = []

    train(model, optimizer, step=step_as_zero_3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_stepping_group_by_group_gives_the_same():
    config, clock = settings(4), clock_of("exponential", 4)
    whole, _ = emulate("momentum", config, clock)
    model = build_model()
    params = list(model.parameters())
    optimizer = delayed(OPTIMIZERS["momentum"]([{"params": params[:2]}, {"params": params[2:]}]), config, clock)

    def step_as_zero_2() -> None:
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
            optimizer.param_groups = groups

    train(model, optimizer, step=step_as_zero_2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_fresh_gradients_stay_where_the_engine_put_them():
    model = build_model()
    optimizer = delayed(OPTIMIZERS["momentum"](list(model.parameters())), settings(4), clock_of("exponential", 4))
    for k in range(10):
        optimizer.zero_grad()
        model(batch(k)).backward()
        fresh = [(p.grad, p.grad.clone()) for p in model.parameters()]
        optimizer.begin_update()
        optimizer.step()
        for p, (gradient, value) in zip(model.parameters(), fresh, strict=True):
            assert p.grad is gradient and torch.equal(gradient, value)


def test_engine_may_reuse_its_gradient_buffers():
    """ZeRO with offload writes every gradient into the same buffer."""
    config, clock = settings(4), clock_of("exponential", 4)
    expected, _ = emulate("momentum", config, clock)
    model = build_model()
    optimizer = delayed(OPTIMIZERS["momentum"](list(model.parameters())), config, clock)
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for k in range(GRADIENTS):
        for p, buffer in zip(model.parameters(), buffers, strict=True):
            p.grad = buffer.zero_()
        model(batch(k)).backward()
        optimizer.begin_update(last=k == GRADIENTS - 1)
        optimizer.step()
    assert worst_distance(model, expected) < 1e-6


class CopiedElements(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bound, per_update", [(None, 1), (1, 1), (None, 3)])
def test_swapping_copies_one_shard_and_memory_stays(bound, per_update):
    model = build_model()
    config = settings(4, max_staleness=bound, gradients_per_update=per_update)
    optimizer = delayed(OPTIMIZERS["sgd"](list(model.parameters())), config, clock_of("exponential", 4))
    shard = sum(p.numel() for p in model.parameters())
    held = []
    for k in range(40):
        optimizer.zero_grad()
        model(batch(k)).backward()
        optimizer.begin_update()
        with CopiedElements() as copied:
            optimizer.step()
        assert copied.count <= shard
        held.append(optimizer.pending_gradient_bytes)
    limit = expected_pending_bytes(config, shard)["gradients"]
    assert held[:3] == [4 * shard * n for n in (1, 2, 3)]
    assert max(held) == held[-1] == limit


@pytest.mark.parametrize("remedy", [{"remedy": "dc_asgd"}, {"remedy": "dc_asgd", "dc_adaptive": True}])
@pytest.mark.parametrize("per_update", [1, 3])
def test_held_bytes_are_at_most_the_expected(remedy, per_update):
    model = build_model()
    config = settings(4, gradients_per_update=per_update, **remedy)
    optimizer = delayed(OPTIMIZERS["sgd"](list(model.parameters())), config, clock_of("exponential", 4))
    held = []
    for k in range(40):
        optimizer.zero_grad()
        model(batch(k)).backward()
        optimizer.begin_update()
        optimizer.step()
        held.append(optimizer.pending_gradient_bytes)
    expected = sum(expected_pending_bytes(config, sum(p.numel() for p in model.parameters())).values())
    assert max(held) == held[-1] == expected


def test_pending_gradients_may_live_on_the_cpu():
    config = settings(4, pending_device="cpu", remedy="dc_asgd", gradients_per_update=2)
    same = settings(4, remedy="dc_asgd", gradients_per_update=2)
    clock = clock_of("exponential", 4)
    assert worst_distance(emulate("adamw", config, clock)[0], emulate("adamw", same, clock)[0]) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("remedy", [{}, {"remedy": "dc_asgd", "gradients_per_update": 3, "dc_adaptive": True}])
def test_pending_gradients_of_a_gpu_may_live_on_the_cpu(remedy):
    models, bytes_on_gpu = [], []
    for device in ("same", "cpu"):
        model = build_model().cuda()
        inner = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        optimizer = delayed(inner, settings(4, pending_device=device, **remedy), clock_of("exponential", 4))
        for k in range(GRADIENTS):
            optimizer.zero_grad()
            model(batch(k).cuda()).backward()
            optimizer.begin_update(last=k == GRADIENTS - 1)
            optimizer.step()
            if k == 23:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if k == 40:
                bytes_on_gpu.append(torch.cuda.memory_allocated())
        models.append(model)
    assert worst_distance(*models) < 1e-6
    assert bytes_on_gpu[1] < bytes_on_gpu[0]


def test_gradient_the_engine_skips_is_computed_anew():
    """An engine that meets a gradient that is not finite never calls step: the batch is lost, nothing else."""
    config, clock = settings(4), clock_of("exponential", 4)
    expected, _ = emulate("momentum", config, clock)
    model = build_model()
    optimizer = delayed(OPTIMIZERS["momentum"](list(model.parameters())), config, clock)
    for k in range(GRADIENTS):
        optimizer.zero_grad()
        model(batch(k)).backward()
        last = k == GRADIENTS - 1
        if k in (1, 20, GRADIENTS - 1):
            skipped = optimizer.begin_update(last)
            assert optimizer.begin_update(last) == skipped
        else:
            optimizer.begin_update(last)
        optimizer.step()
    assert optimizer.schedule.tally.applied == GRADIENTS
    assert worst_distance(model, expected) == 0


def test_state_of_a_skipped_update_is_that_before_it():
    optimizer = delayed(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), settings(4), clock_of("constant", 4))
    before = copy.deepcopy(optimizer.state_dict()["delayed"])
    optimizer.begin_update()
    assert optimizer.state_dict()["delayed"] == before


def test_parameter_without_gradient_is_left_out():
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    config = settings(3, gradients_per_update=2, remedy="dc_asgd", dc_adaptive=True)
    optimizer = delayed(torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5), config, clock_of("constant", 3))
    for k in range(9):
        used.grad = torch.ones(2)
        optimizer.begin_update(last=k == 8)
        optimizer.step()
    assert torch.equal(unused, torch.ones(2)) and unused not in optimizer.state
    assert optimizer.state[used]["step"] == 5


def test_step_before_the_first_update_is_the_inner_optimizers():
    w = nn.Parameter(torch.ones(1))
    optimizer = delayed(torch.optim.SGD([w], lr=0.5), settings(4), clock_of("constant", 4))
    w.grad = torch.ones(1)
    optimizer.step()
    assert w.item() == 0.5 and optimizer.schedule.tally.computed == 0


def test_second_step_of_an_update_is_refused():
    w = nn.Parameter(torch.ones(1))
    optimizer = delayed(torch.optim.SGD([w], lr=0.5), settings(4), clock_of("constant", 4))
    w.grad = torch.ones(1)
    optimizer.begin_update()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"begin_update\(\) before every engine step"):
        optimizer.step()


def test_memory_for_weight_copies_is_checked():
    check_pending_memory(settings(8), 2**28, 7 * 2**30)
    with pytest.raises(ConfigError, match=r"workers=8: .* need 7\.00 GiB per rank; 6\.00 GiB are free") as plain:
        check_pending_memory(settings(8), 2**28, 6 * 2**30)
    with pytest.raises(ConfigError, match=r"15\.00 GiB per rank, 8\.00 of them for DC-ASGD's weight copies"):
        check_pending_memory(settings(8, remedy="dc_asgd"), 2**28, 7 * 2**30)
    assert "\n" not in str(plain.value)
