"""A run's newest checkpoint as a plain Hugging Face folder: ``python -m harness.export RUN OUT``.

``AutoModelForCausalLM.from_pretrained(OUT)`` reads it, whatever engine, stage and world wrote the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.checkpoint_folder import checkpoint_of
from harness.config import ConfigError, load


def export(run: Path, out: Path) -> Path:
    """Write the weights of a run's newest checkpoint, fp32, and the model's config to ``out``.

    Args:
        run: a run directory, or one of its checkpoints.

    Raises:
        ConfigError: in one line, when there is no checkpoint, it is damaged, or ``out`` is not empty.
    """
    checkpoint = checkpoint_of(run)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: exists and is not empty; give a new folder")
    import torch

    from harness.checkpoint import WEIGHT, Reader
    from harness.model import meta_model

    try:
        config = load((checkpoint.parent.parent / "config.yaml").read_text())
    except OSError as error:
        raise ConfigError(f"{checkpoint}: lies in no run directory ({error})") from error
    reader, model = Reader(checkpoint), meta_model(config)
    weights = {name: reader.read(name, WEIGHT, 0, p.numel()).view(p.shape) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in weights:  # tied to one that is
            weights[name] = next(weights[other] for other, p in model.named_parameters() if p is parameter)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.tie_weights()
    model.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory, or one of its checkpoints")
    parser.add_argument("out", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    try:
        print(export(arguments.run, arguments.out))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
