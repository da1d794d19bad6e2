"""A campaign of random faults against sweeps of real worlds.

    python tests/campaign.py --injections 60 --seed 0 --out table.md

A sweep has six points, told apart by their batch. Each time it is started, every point that is not complete meets its
next fault; when the faults are used up it is started once more and must complete. After each fault: the status is the
right one, no process is left, every checkpoint that was whole is still there and loadable, no row of metrics is lost
that a checkpoint covers; and at the end every point has the losses of a run that nothing happened to.
Injection N of a seed is always the same, so ``--start N`` goes on. Mounts need root; without, two kinds are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from harness.checkpoint_folder import find_checkpoints  # noqa: E402
from harness.rundir import RunDir  # noqa: E402
from tests.launched import MAIN, Launched  # noqa: E402

BATCHES = (4, 6, 8, 10, 12, 14)
STEPS = 60
TIMEOUT_S = 60
ENGINES = ("zero1", "zero3", "ddp", "zero2", "fsdp", "zero0")
POINT = [
    "launch.world_size=2", f"train.steps={STEPS}", "train.checkpoint_every=60", "train.log_every=1", "data=text",
    "data.seq_len=128", "data.eval_samples=8",
]  # fmt: skip
CONSTANTS = {"harness.forkserver": {"GRACE_S": 8}, "harness.train": {"WANDB_S": 4, "FINISH_S": 4}}
MARK = "CAMPAIGN"  # in the environment of every process of a campaign
WHEN = ("start", "updates", "checkpoint")


@dataclass(frozen=True)
class Kind:
    """What is right after a fault.

    Attributes:
        statuses: that the run may have; None stands for no status at all.
        words: what the reason says, as a regular expression, once the first update is done.
        when: the moments at which it makes sense.
    """

    statuses: tuple[str | None, ...]
    words: str = ""
    when: tuple[str, ...] = WHEN


RIGHT = {
    "kill rank 0": Kind(("failed",), "rank 0 died without a word"),
    "kill rank 1": Kind(("failed",), "rank 1 died without a word"),
    "kill server": Kind(("completed",), when=("updates", "checkpoint")),
    "kill parent": Kind(("killed",), "launcher vanished"),
    "stop rank 0": Kind(("timeout",), "launch.timeout_s"),
    "stop rank 1": Kind(("timeout",), "launch.timeout_s"),
    "stop and continue parent": Kind(("completed",)),
    "disk full": Kind(("failed", "killed"), "No space left|vanished", when=("updates", "checkpoint")),
    "run directory removed": Kind((None, "failed"), when=("updates", "checkpoint")),
    "run directory read-only": Kind(("failed", "killed"), "Read-only|vanished", when=("updates", "checkpoint")),
    "port taken": Kind(("failed",), "in use", when=("start",)),
    "data vanishes": Kind(("failed",), "no such file", when=("start",)),
    "NaN in gradients": Kind(("diverged",), "nan", when=("updates",)),
    "checkpoint damaged": Kind(("failed",), "rank 1 died without a word", when=("checkpoint",)),
    "wandb unreachable": Kind(("completed",), when=("start",)),
    "wandb slow": Kind(("completed",), when=("start",)),
    "wandb killed": Kind(("completed",), when=("updates",)),
}
SLOW_KINDS = ("stop rank 0", "stop rank 1")  # cost launch.timeout_s: half as often
MOUNTING = ("disk full", "run directory read-only")
BY_ITSELF = {
    "NaN in gradients": "nan", "wandb unreachable": "wandb unreachable", "wandb slow": "wandb slow",
    "port taken": "port taken", "data vanishes": "data vanishes",
}  # fmt: skip
DAMAGES = ("byte flipped", "truncated", "empty", "removed", "overwritten", "description cut")


@dataclass
class Injection:
    number: int
    kind: str
    when: str
    delay_s: float
    update: int
    damage: str
    failures: list[str] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int, number: int, kinds: list[str]) -> Injection:
        """Injection ``number``: every kind once or twice in each round of them, in random order."""
        rounds = kinds + [kind for kind in kinds if kind not in SLOW_KINDS]
        order = random.Random(f"{seed}/{number // len(rounds)}").sample(rounds, len(rounds))
        kind = order[number % len(rounds)]
        chance = random.Random(f"{seed}:{number}")
        when = chance.choice(RIGHT[kind].when)
        delay_s = chance.uniform(0, 6 if when == "start" else 1.5)
        return cls(number, kind, when, delay_s, chance.randrange(2, 12), chance.choice(DAMAGES))

    def __str__(self) -> str:
        more = f", {self.damage}" if self.kind == "checkpoint damaged" else ""
        return f"#{self.number} {self.kind} ({self.when} + {self.delay_s:.1f} s{more})"


@dataclass
class Point:
    """One point of a sweep and what has been seen of it."""

    batch: int
    run: RunDir | None = None
    last: Injection | None = None
    whole: int = 0  # samples of the newest whole checkpoint
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics, that it covers
    damaged: set[str] = field(default_factory=set)

    @property
    def step(self) -> int:
        """The update that a run goes on after."""
        return self.whole // self.batch

    @property
    def completed(self) -> bool:
        return ((self.run and self.run.read_status()) or {}).get("status") == "completed"


def processes(mark: str) -> list[psutil.Process]:
    """Every process of a campaign but this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class World:
    """The processes of one run; a rank is known by its name and by the log that it writes."""

    def __init__(self, mark: str, batch: int):
        self.mark, self.log = mark, re.compile(rf"(\S*-b{batch}-\w+)/logs/(rank\d)\.log")

    def members(self) -> dict[str, psutil.Process]:
        """By name: ``rank 0``, ``rank 1``, and ``server``, which they were forked from, while one lives."""
        found = {}
        for process in processes(self.mark):
            with suppress(psutil.Error, OSError):
                log = self.log.fullmatch(os.readlink(f"/proc/{process.pid}/fd/1"))
                if log and process.name() == log[2]:
                    found[f"rank {log[2][4:]}"] = process
                    if process.ppid() != 1:
                        found["server"] = process.parent()
        return found

    def run(self) -> RunDir | None:
        for process in self.members().values():
            with suppress(psutil.Error, OSError):
                log = self.log.fullmatch(os.readlink(f"/proc/{process.pid}/fd/1"))
                if log:
                    return RunDir(Path(log[1]))
        return None


def wait_for(condition: Callable[[], Any], timeout_s: float, every_s: float = 0.1) -> Any:
    """The first true value of a condition, or the last one when time is up."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return value


class Sweep:
    """One study that is started again and again until it is complete."""

    def __init__(
        self, folder: Path, corpus: Path, engine: str, study: str, mark: str, batches: tuple[int, ...] = BATCHES
    ):
        self.folder, self.corpus, self.mark = folder, corpus, mark
        self.study = folder / "runs" / study
        self.points = [Point(batch) for batch in batches]
        self.command = [
            sys.executable, MAIN, "-m", f"+exp={engine}", f"batch.global_size={','.join(map(str, batches))}",
            f"study={study}", f"data.path={corpus}", f"launch.timeout_s={TIMEOUT_S}", "launch.rerun=failed", *POINT,
        ]  # fmt: skip

    @property
    def missing(self) -> list[Point]:
        return [point for point in self.points if not point.completed]

    def start(self, faults: dict[str, Any]) -> Launched:
        environment = {"FAULTS": json.dumps(faults), "CONSTANTS": json.dumps(CONSTANTS), MARK: self.mark}
        path = f"{ROOT}/tests/faults:{ROOT}"
        return Launched(self.command, self.folder, PYTHONPATH=path, WANDB_MODE="offline", **environment)

    def inject(self, queue: deque[Injection]) -> list[Injection]:
        """Start the sweep once, with a fault in every point that is not complete; the faults that happened."""
        plan = {point.batch: queue.popleft() for point in self.missing if queue}
        faults = {}
        for point in self.missing:
            each = plan.get(point.batch)
            if each and each.kind in BY_ITSELF:
                place = [1, min(point.step + each.update, STEPS - 2)] if each.kind == "NaN in gradients" else [0, 0]
                faults[f"-b{point.batch}-"] = [*place, BY_ITSELF[each.kind]]
        launched, done = self.start(faults), []
        for point in self.missing:
            injection = plan.get(point.batch)
            world = World(self.mark, point.batch)
            found = wait_for(lambda w=world, s=launched: w.run() or s.process.poll() is not None, 120)
            if not isinstance(found, RunDir):
                break
            point.run = found
            if injection is None:
                wait_for(lambda w=world: not w.members(), 3 * TIMEOUT_S)
            elif self.happened(injection, point, world, launched):
                done.append(injection)
                plan.pop(point.batch)
        with suppress(subprocess.TimeoutExpired):
            launched.process.wait(120)
        queue.extendleft(reversed(plan.values()))
        with open(self.folder / "output.log", "a") as log:
            log.write(launched.text())
        wait_for(lambda: not processes(self.mark), 20)
        failures = []
        for process in processes(self.mark):
            failures.append(f"left behind pid {process.pid}, {process.name()}")
            process.kill()
        if launched.process.poll() != 0 and not any(each.kind == "kill parent" for each in done):
            failures.append(f"the sweep ended with {launched.process.returncode}: {launched.text()[-300:]}")
        for each in [*(point.last for point in self.points if point.last), *done][-1:]:
            each.failures += failures
        return done

    def happened(self, injection: Injection, point: Point, world: World, launched: Launched) -> bool:
        """Inject a fault, wait for the end of the world and judge it; False when the run was over before."""
        assert point.run is not None
        before = len(read_rows(point.run)), find_checkpoints(point.run.path / "checkpoints")[-1:]
        with ExitStack() as undo:
            if not self.wait_until(injection, point, world, before):
                return False
            updated = len(read_rows(point.run)) not in (0, before[0])
            OUTSIDE.get(injection.kind, nothing)(injection, point, world, launched, self, undo)
            wait_for(lambda: not world.members(), 3 * TIMEOUT_S)
        for process in world.members().values():
            injection.failures.append(f"left behind {process.cmdline()[-3:]}")
            process.kill()
        if injection.kind == "checkpoint damaged":
            damage(injection.damage, point)
        said = f"  {point.run.path.name}  "
        wait_for(lambda: said in launched.text() or launched.process.poll() is not None, 60)
        point.last = injection
        right = RIGHT[injection.kind]
        status = point.run.read_status() or {}
        word = status.get("status")
        overtaken = word == "completed" and len(read_rows(point.run)) == STEPS  # it was over before the fault came
        if word not in right.statuses and not overtaken:
            injection.failures.append(f"status {word}: {status.get('reason')}")
        elif updated and not overtaken and not re.search(right.words, status.get("reason", "")) and word is not None:
            injection.failures.append(f"reason: {status.get('reason')}")
        if injection.kind == "run directory removed":
            point.whole, point.rows, point.damaged = 0, [], set()
        check_kept(injection, point)
        if injection.failures and point.run.path.exists():
            shutil.copytree(point.run.path, self.folder / "failed" / str(injection.number))
        say(f"  {injection}: {word} {'' if not injection.failures else injection.failures}")
        return True

    def wait_until(self, injection: Injection, point: Point, world: World, before: tuple[int, list[Path]]) -> bool:
        run = point.run
        assert run is not None
        rows, newest = before
        if injection.kind == "NaN in gradients" and point.step > STEPS - 3:
            return False
        if injection.kind in BY_ITSELF:
            return True  # at once
        arrived = {
            "start": lambda: len(world.members()) == 3,
            "updates": lambda: len(read_rows(run)) > 0 and len(read_rows(run)) != rows,
            "checkpoint": lambda: find_checkpoints(run.path / "checkpoints")[-1:] != newest,
        }[injection.when]
        wait_for(lambda: arrived() or not world.members(), 3 * TIMEOUT_S, 0.05)
        if not arrived():
            return False
        time.sleep(injection.delay_s)
        return bool(world.members())

    def check_complete(self, losses: dict[int, list[float]]) -> None:
        """Every point has every update, of the losses by batch where they are given."""
        for point in self.points:
            failures = point.last.failures if point.last else []
            if not point.completed or point.run is None:
                failures.append("does not complete when started again")
                continue
            rows = point.run.read_metrics()
            if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
                failures.append(f"rows of updates {[row['step'] for row in rows]}")
            elif any(
                abs(row["loss"] / loss - 1) > 0.02 for row, loss in zip(rows, losses.get(point.batch, []), strict=False)
            ):
                failures.append("other losses than a run that nothing happened to")
        if not (self.study / "report" / "index.html").exists():
            self.points[-1].last.failures.append("no report")  # type: ignore[union-attr]


def read_rows(run: RunDir) -> list[dict[str, Any]]:
    with suppress(ValueError):  # a row is being written
        return run.read_metrics()
    return []


def check_kept(injection: Injection, point: Point) -> None:
    """Nothing that was saved is lost: the newest checkpoint is whole and no older than before, nor are its rows."""
    assert point.run is not None
    folders = [p for p in find_checkpoints(point.run.path / "checkpoints") if str(p) not in point.damaged]
    whole = int(folders[-1].name.split("-")[1]) if folders else 0
    if whole < point.whole:
        injection.failures.append(f"newest checkpoint was samples-{point.whole}, is samples-{whole}")
    if folders:
        for file in folders[-1].glob("rank-*.safetensors"):
            load_file(file)
    step = whole // point.batch
    rows = [row for row in read_rows(point.run) if row["step"] <= step]
    if [row["step"] for row in rows] != list(range(1, step + 1)):
        injection.failures.append(f"{step} updates are saved, but metrics has {[row['step'] for row in rows]}")
    if point.rows[:step] != rows[: len(point.rows)]:
        injection.failures.append("rows that a checkpoint covers have changed")
    point.whole, point.rows = whole, rows


def damage(how: str, point: Point) -> None:
    """Damage the newest checkpoint."""
    assert point.run is not None
    folder = find_checkpoints(point.run.path / "checkpoints")[-1]
    file = sorted(folder.glob("rank-*.safetensors"))[-1]
    size = file.stat().st_size
    if how == "byte flipped":
        with open(file, "r+b") as shard:
            shard.seek(size // 2)
            (byte,) = shard.read(1)
            shard.seek(size // 2)
            shard.write(bytes([byte ^ 1]))
    elif how == "truncated":
        os.truncate(file, size // 2)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "removed":
        file.unlink()
    elif how == "overwritten":
        file.write_bytes(random.Random(0).randbytes(size))
    else:
        os.truncate(folder / "checkpoint.json", 50)
    point.damaged.add(str(folder))
    whole = [p for p in find_checkpoints(folder.parent) if str(p) not in point.damaged]
    point.whole = int(whole[-1].name.split("-")[1]) if whole else 0
    point.rows = point.rows[: point.whole // point.batch]


def nothing(*_: Any) -> None:
    """The rank does it to itself."""


def send(number: signal.Signals, name: str) -> Callable[..., None]:
    def to_member(injection: Injection, point: Point, world: World, *_: Any) -> None:
        with suppress(KeyError, psutil.Error):
            world.members()[name].send_signal(number)

    return to_member


def kill_parent(injection: Injection, point: Point, world: World, launched: Launched, *_: Any) -> None:
    launched.process.kill()


def stop_and_continue_parent(injection: Injection, point: Point, world: World, launched: Launched, *_: Any) -> None:
    launched.process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    launched.process.send_signal(signal.SIGCONT)


def kill_wandb(injection: Injection, point: Point, world: World, *_: Any) -> None:
    for process in processes(world.mark):
        if "wandb-core" in process.name():
            process.kill()


def fill_disk(injection: Injection, point: Point, world: World, launched: Launched, sweep: Sweep, undo: Any) -> None:
    filler = sweep.folder / "runs" / "filler"
    undo.callback(filler.unlink, missing_ok=True)
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**20))


def remove_run(injection: Injection, point: Point, *_: Any) -> None:
    assert point.run is not None
    shutil.rmtree(point.run.path, ignore_errors=True)
    shutil.rmtree(point.run.path, ignore_errors=True)  # what a rank wrote meanwhile


def make_read_only(
    injection: Injection, point: Point, world: World, launched: Launched, sweep: Sweep, undo: Any
) -> None:
    assert point.run is not None
    path = str(point.run.path)
    subprocess.run(["mount", "--bind", path, path], check=True)
    undo.callback(subprocess.run, ["umount", "--lazy", path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)


OUTSIDE: dict[str, Callable[..., None]] = {
    **{f"kill {name}": send(signal.SIGKILL, name) for name in ("rank 0", "rank 1", "server")},
    **{f"stop {name}": send(signal.SIGSTOP, name) for name in ("rank 0", "rank 1")},
    "kill parent": kill_parent,
    "stop and continue parent": stop_and_continue_parent,
    "disk full": fill_disk,
    "run directory removed": remove_run,
    "run directory read-only": make_read_only,
    "checkpoint damaged": send(signal.SIGKILL, "rank 1"),  # and damage, once the world has ended
    "wandb killed": kill_wandb,
}


def reference_losses(world: Any, configs: list[Any]) -> list[list[float]]:
    """The losses of uninterrupted runs, on one rank."""
    from harness.engines import build_engine
    from harness.server import Server
    from tests.test_checkpoint import steps_of

    losses = []
    for config in configs:
        engine = build_engine(config, world)
        losses.append(steps_of(world, config, engine, Server(config, world, engine), 0, STEPS))
    return losses


def reference(corpus: Path) -> dict[int, list[float]]:
    from tests.worlds import compose, run_world

    shared = [each for each in POINT if "world_size" not in each]
    configs = [compose("+exp=zero1", *shared, f"data.path={corpus}", f"batch.global_size={batch}") for batch in BATCHES]
    return dict(zip(BATCHES, run_world(1, reference_losses, configs)[0], strict=True))


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A file system of its own of 600 MB at a folder; False where that is not permitted."""
    path.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "campaign", str(path)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run_campaign(seed: int, start: int, injections: int, folder: Path) -> list[Injection]:
    """Injections ``start`` … ``start + injections - 1`` of a seed, with what went wrong after each."""
    corpus = folder / "corpus.txt"
    shutil.copy(ROOT / "README.md", corpus)
    mark, finished = f"{os.getpid()}-{time.time()}", []
    with small_disk(folder / "runs") as mounts:
        kinds = [kind for kind in RIGHT if mounts or kind not in MOUNTING]
        queue = deque(Injection.draw(seed, number, kinds) for number in range(start, start + injections))
        losses = reference(corpus)
        number = 0
        while queue:
            engine = ENGINES[(start // len(BATCHES) + number) % len(ENGINES)]
            sweep, done = Sweep(folder, corpus, engine, f"sweep{number}", mark), []
            say(f"sweep {number}: {engine}, {len(queue)} injections left")
            while queue and sweep.missing and (fresh := sweep.inject(queue)):
                done += fresh
            sweep.inject(deque())
            sweep.check_complete(losses)
            failed = [each for each in done if each.failures]
            for each in failed:
                say(f"  FAILED {each}: {each.failures}")
            shutil.rmtree(sweep.study)
            assert done, f"nothing could be injected: {folder}"
            finished += done
            number += 1
    return finished


def to_table(injections: list[Injection]) -> str:
    lines = ["| fault | survived / total |", "| --- | --- |"]
    for kind in RIGHT:
        these = [each for each in injections if each.kind == kind]
        if these:
            lines.append(f"| {kind} | {sum(not each.failures for each in these)} / {len(these)} |")
    lines.append(f"| all | {sum(not each.failures for each in injections)} / {len(injections)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random faults against sweeps of real worlds.")
    parser.add_argument("--injections", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first injection")
    parser.add_argument("--folder", type=Path, help="where the runs lie; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=options.folder))
    injections = run_campaign(options.seed, options.start, options.injections, folder)
    text = to_table(injections)
    print(text)
    for each in injections:
        for failure in each.failures:
            print(f"{each}: {failure}  ({folder})")
    if options.out:
        options.out.write_text(text)
    return 1 if any(each.failures for each in injections) else 0


if __name__ == "__main__":
    sys.exit(main())
