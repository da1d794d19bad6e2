"""The largest stable learning rate of gradient descent on a quadratic, against staleness.

python experiments/async/stable_rate.py --out experiments/async

One dimension, curvature 1, no noise but the clock's. The schedule of the harness says which gradients arrive; a rate
is stable if the last fifth of the run stays below the first fifth, for every seed. Bisection to 1 %. Writes
stable_rate.json and stable_rate.png.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.remove(str(Path(__file__).resolve().parent))

from harness.asynchrony import stability_limit
from harness.clock import Clock
from harness.staleness import AsyncSchedule, rate_factor

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ARMS = {
    "constant": ("constant", 0.0, "none"),
    "lognormal, cv 0.1": ("lognormal", 0.1, "none"),
    "exponential": ("exponential", 0.0, "none"),
    "exponential, lr / staleness": ("exponential", 0.0, "lr_over_staleness"),
}


def stable(rate: float, law: str, cv: float, remedy: str, workers: int, seed: int) -> bool:
    """Whether descent from 1 converges; in double precision, 300 updates per worker and 2000 at least."""
    schedule = AsyncSchedule(Clock(law, cv=cv, seed=seed), workers, 1.0)
    updates = max(2000, 300 * workers)
    w, path, pending = 1.0, [1.0], {}
    for k in range(updates):
        pending[k] = w
        for arrival in schedule.advance():
            assert arrival.update is not None
            w -= rate * rate_factor(arrival.update, remedy) * pending.pop(arrival.gradient)
            path.append(abs(w))
            if abs(w) > 1e6:
                return False
    fifth = len(path) // 5
    return max(path[-fifth:]) < max(path[:fifth])


def largest_stable_rate(law: str, cv: float, remedy: str, workers: int, seeds: int) -> float:
    """In units of 1 / curvature, to 1 %."""
    low, high = 0.0, 4.0
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        if all(stable(middle, law, cv, remedy, workers, seed) for seed in range(seeds)):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def draw(result: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for marker, (name, rates) in zip("os^D", result.items(), strict=True):
        axis.plot([int(n) - 1 for n in rates], list(rates.values()), marker=marker, markersize=4, label=name)
    delays = range(max(WORKERS))
    axis.plot(delays, [stability_limit(tau) for tau in delays], "--", color="#777777", label="constant delay, theory")
    axis.set_yscale("log")
    axis.set_xlabel("mean staleness: workers - 1 (weight updates)")
    axis.set_ylabel("largest stable rate (1 / curvature)")
    axis.set_title("Gradient descent on a quadratic under asynchrony", fontsize=10)
    axis.grid(color="#DDDDDD")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for name, (law, cv, remedy) in ARMS.items():
        seeds = 1 if law == "constant" else arguments.seeds
        rates = {n: largest_stable_rate(law, cv, remedy, n, seeds) for n in arguments.workers}
        result[name] = {str(n): round(rate, 5) for n, rate in rates.items()}
        print(name, result[name], flush=True)
    result_with_theory = {
        **result,
        "constant delay, theory": {str(n): stability_limit(n - 1) for n in arguments.workers},
    }
    (arguments.out / "stable_rate.json").write_text(json.dumps(result_with_theory, indent=1) + "\n")
    draw(result, arguments.out / "stable_rate.png")


if __name__ == "__main__":
    main()
