"""Published and derived numbers of ``tests/oracle``, each with its source and tolerance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "oracle"


def cases(group: str) -> list[Any]:
    """One pytest parameter per case of a group."""
    return [pytest.param(case, id=case["id"]) for case in json.loads((FOLDER / f"{group}.json").read_text())]


def check(actual: dict[str, Any], case: dict[str, Any]) -> None:
    """Every expected number, or list of numbers, within the case's tolerance."""
    tolerance = case["tol"]
    for key, expected in case["expected"].items():
        if isinstance(expected, str):
            continue  # the unit, in words
        got = actual[key]
        pairs = zip(got, expected, strict=True) if isinstance(expected, list) else [(got, expected)]
        for value, wanted in pairs:
            limit = tolerance.get("abs", 0) + tolerance.get("rel", 0) * abs(wanted)
            close = value == wanted or math.isclose(value, wanted, rel_tol=1e-12) or abs(value - wanted) <= limit
            assert close, f"{key}: {value} is not {wanted} within {limit} ({case['source']})"
