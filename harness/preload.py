"""What a rank needs, whatever its config says: imported once by the process that ranks are forked from."""

from harness.environment import uncollected

with uncollected():
    import deepspeed  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    import wandb  # noqa: F401

    import harness.engines.ddp
    import harness.engines.deepspeed
    import harness.engines.fsdp
    import harness.train  # noqa: F401
