"""Imported once by the process that test ranks are forked from."""

import gc

import deepspeed  # noqa: F401
import torch  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import harness.engines.ddp
import harness.engines.deepspeed
import harness.engines.fsdp
import harness.train  # noqa: F401

gc.freeze()  # else a rank looks through all of this each time DeepSpeed or torch collects garbage
