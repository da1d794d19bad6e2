"""What DDP's and FSDP2's ranks hold and communicate is predicted to 1 %, in real worlds."""

import pytest

from harness.hf_config import model_shape
from harness.prediction import held_and_sent
from tests.test_deepspeed_exact import LLAMA, ODD, measure_all
from tests.worlds import compose, run_world

pytest.importorskip("harness.engines.fsdp")

CASES = [
    (ODD, "engine=ddp"),
    (ODD, "engine=ddp batch.micro_size=1"),
    (ODD, "engine=ddp precision=bf16 engine.bucket_mb=0.05"),
    (ODD, "engine=ddp engine.overlap=false optimizer=sgd"),
    (ODD, "engine=fsdp"),
    (ODD, "engine=fsdp precision=bf16"),
    (ODD, "engine=fsdp batch.micro_size=1"),
    (ODD, "engine=fsdp engine.reshard=false"),
    (ODD, "engine=fsdp checkpointing=full"),
    (LLAMA, "engine=fsdp precision=bf16 batch.micro_size=1"),
]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_bytes_held_and_communicated_are_predicted(world_size):
    configs = [compose(*model, *case.split(), world_size=world_size) for model, case in CASES]
    by_rank = run_world(world_size, measure_all, configs)
    wrong = []
    for (_, case), config, ranks in zip(CASES, configs, zip(*by_rank, strict=True), strict=True):
        held, collectives = held_and_sent(config, model_shape(config.model), config.engine.kind, world_size)
        for kind in ("param", "grad", "optimizer"):
            fullest = max(rank[0][kind] for rank in ranks)
            if fullest != pytest.approx(getattr(held, kind), rel=1e-2):
                wrong.append(f"{case}: {kind} {fullest} bytes, predicted {getattr(held, kind)}")
        sent, made = {}, {}
        for each in collectives:
            sent[each.operation] = sent.get(each.operation, 0) + each.input(world_size)
            made[each.operation] = made.get(each.operation, 0) + each.calls
        if ranks[0][1] != pytest.approx(sent, rel=1e-2):
            wrong.append(f"{case}: sent {ranks[0][1]}, predicted {sent}")
        if ranks[0][2] != made:
            wrong.append(f"{case}: calls {ranks[0][2]}, predicted {made}")
    assert not wrong, "\n".join(wrong)
