"""What a rank needs, whatever its config says: imported once by the process that ranks are forked from."""

import gc

gc.disable()  # what imports make stays; to look through it for garbage takes a fifth of their time

import deepspeed  # noqa: E402, F401
import torch  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401
import wandb  # noqa: E402, F401

import harness.engines.ddp  # noqa: E402
import harness.engines.deepspeed  # noqa: E402
import harness.engines.fsdp  # noqa: E402
import harness.train  # noqa: E402, F401

gc.freeze()
gc.enable()
