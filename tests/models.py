"""The models of ``conf/model`` that carry their own config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).parents[1] / "conf"


def shipped_models() -> list[tuple[str, dict[str, Any]]]:
    """Family and config of every one that is not pretrained."""
    options = [yaml.safe_load(path.read_text()) for path in sorted((CONF / "model").glob("*.yaml"))]
    return [(option["family"], option["config"]) for option in options if "family" in option]
