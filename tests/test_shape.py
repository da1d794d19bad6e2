import pytest
import torch
import yaml

from harness.shape import read_shape
from tests.models import CONF, shipped_models

transformers = pytest.importorskip("transformers")

BASE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
GROUPED = BASE | {"num_key_value_heads": 2}


def parameters(family, config):
    settings = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return settings, sum(parameter.numel() for parameter in model.parameters()), model


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *shipped_models(),
        ("gpt2", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 100}),
        ("gpt2", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False}),
        ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
        ("llama", GROUPED | {"head_dim": 32, "tie_word_embeddings": True}),
        ("mistral", GROUPED),
        ("qwen2", GROUPED),
        ("qwen3", GROUPED | {"head_dim": 32}),
        ("gemma", GROUPED | {"head_dim": 32}),
        ("smollm3", GROUPED | {"pad_token_id": 0}),
        ("gpt_neox", BASE),
        ("starcoder2", GROUPED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_are_counted_exactly(family, config):
    settings, count, model = parameters(family, config)
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    for given in (settings.to_dict(), {"n_positions": 1024, "head_dim": getattr(settings, "head_dim", None)} | config):
        shape = read_shape(given, family)
        assert shape.params == count
        assert shape.largest_layer_params == largest


def test_the_shape_of_llama_3_8b():
    config = yaml.safe_load((CONF / "model" / "llama_8b.yaml").read_text())["config"]
    assert read_shape(config, "llama").params == 8_030_261_248


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_embd": 64}, "needs num_attention_heads or n_head"),
        (BASE | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (BASE | {"vocab_size": 3.5}, "vocab_size=3.5"),
        (BASE | {"num_local_experts": 8}, "mixture of experts"),
    ],
)
def test_a_config_without_a_dense_shape_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read_shape(config, "llama")
