import pytest

from harness import convergence
from tests.cases import cases, check


@pytest.mark.parametrize("case", cases("stats"))
def test_reference_convergence_points_are_as_published(case):
    given = case["input"]
    if "ref" in given:
        point = convergence.reference_point(given["ref"], given["n_sub"])
    else:
        point = convergence.reference_point_of(given["mean"], given["std"], given["n_sub"])
    speedup = 100 * point.max_speedup
    check({"mean": point.mean, "std": point.std, "min_mean": point.min_mean, "max_speedup_pct": speedup}, case)


# Student's t, one-sided 95 % and 97.5 %, as in any table
@pytest.mark.parametrize(
    ("probability", "dof", "t"),
    [
        (0.95, 1, 6.3138),
        (0.95, 2, 2.9200),
        (0.95, 9, 1.8331),
        (0.95, 30, 1.6973),
        (0.975, 5, 2.5706),
        (0.05, 9, -1.8331),
    ],
)
def test_t_quantiles(probability, dof, t):
    assert convergence.t_quantile(probability, dof) == pytest.approx(t, abs=5e-5)


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        convergence.reference_point([1, 2], 5)
    with pytest.raises(ValueError, match="at least 3"):
        convergence.reference_point_of(10, 1, 2)
    with pytest.raises(ValueError, match="any speed-up"):
        convergence.reference_point_of(10, 100, 5)
