"""config.json of published models, in the forms of transformers 4 and 5."""

import json
from pathlib import Path

import numpy as np
import pytest

from models import rope
from models.config import LinearRopeScaling, TransformerConfig
from models.weights.hf_config import read_config

DATA = Path(__file__).parents[1] / "data" / "tiny"
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


@pytest.fixture
def read(tmp_path):
    def read(fields, **changes):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        return read_config(tmp_path)

    return read


def test_mistral(read):
    config = read(MISTRAL_7B)
    assert config == TransformerConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=32768,
        rms_norm_eps=1e-5,
        sliding_windows=(4096,) * 32,
    )
    assert read(MISTRAL_7B, sliding_window=None).sliding_windows is None


def test_qwen2(read):
    config = read(QWEN2_HALF_B)
    assert (config.head_dim, config.rope_theta, config.qkv_bias, config.tie_word_embeddings) == (64, 1e6, True, True)
    assert config.sliding_windows is None
    assert read(QWEN2_HALF_B, use_sliding_window=True).sliding_windows == (None,) * 21 + (32768,) * 3


def test_qwen3(read):
    fields = QWEN2_HALF_B | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    config = read(fields, attention_bias=False)
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (128, True, False)


def test_gemma2(read):
    config = read(GEMMA2_2B)
    assert config == TransformerConfig(
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_model_len=8192,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,  # although the file does not say so
        sliding_windows=(4096, None) * 13,
        activation="gelu_tanh",
        post_norms=True,
        norm_offset=1.0,
        embed_scale=48.0,
        attention_scale=1 / 16,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
    )
    plain = read(GEMMA2_2B, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.attention_soft_cap, plain.final_soft_cap) == (None, None)


def test_layer_types_go_before_the_rule(read):
    types = ["full_attention"] * 25 + ["sliding_attention"]
    assert read(GEMMA2_2B, layer_types=types).sliding_windows == (None,) * 25 + (4096,)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2"])
def test_both_forms_give_the_same(read, name):
    """What transformers 5 wrote, rewritten as 4 would have: no layer_types, rope_theta by itself."""
    fields = json.loads((DATA / name / "config.json").read_text())
    new = read(fields)
    rope_parameters = fields.pop("rope_parameters")
    fields.pop("layer_types", None)
    assert read(fields, rope_theta=rope_parameters["rope_theta"], rope_scaling=None) == new


@pytest.mark.parametrize(
    "form",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
)
def test_linear_rope_scaling(read, form):
    config = read(MISTRAL_7B, **form)
    assert config.rope_scaling == LinearRopeScaling(4.0)
    plain = rope.inverse_frequencies(read(MISTRAL_7B))
    np.testing.assert_allclose(rope.inverse_frequencies(config) * 4, plain, rtol=1e-7)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types = .* is not supported"),
        (MISTRAL_7B, {"sliding_window": 0}, "a sliding window must be at least 1 .* got 0"),
        (MISTRAL_7B, {"sliding_window": "4096"}, "sliding_window must be an integer, got '4096'"),
        (MISTRAL_7B, {"num_hidden_layers": 10**12}, "num_layers must be .* at most 10,000, got 1000000000000"),
        (MISTRAL_7B, {"vocab_size": 10**12}, "vocab_size must be .* at most 2,147,483,647"),
        (MISTRAL_7B, {"num_attention_heads": 0}, "num_heads must be at least 1"),
        (MISTRAL_7B, {"num_key_value_heads": 5}, "num_heads must be a multiple of num_kv_heads, got 32 and 5"),
        (MISTRAL_7B, {"hidden_size": 4096.5}, "hidden_size must be an integer, got 4096.5"),
        (MISTRAL_7B, {"hidden_size": True}, "hidden_size must be an integer, got True"),
        (MISTRAL_7B, {"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        (MISTRAL_7B, {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        (MISTRAL_7B, {"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
        (MISTRAL_7B, {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        (MISTRAL_7B, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0.0"),
        (
            MISTRAL_7B,
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention is not supported; .* the same in all layers",
        ),
        (QWEN2_HALF_B, {"layer_types": ["full_attention"]}, "layer_types must name .* each of the 24 layers"),
        (QWEN2_HALF_B, {"layer_types": ["chunked_attention"] * 24}, "layer_types must name full_attention or sliding"),
        (
            QWEN2_HALF_B,
            {"layer_types": ["sliding_attention"] * 24, "sliding_window": None},
            "sliding_window must be an integer, got None",
        ),
        (GEMMA2_2B, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (GEMMA2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA2_2B, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be above 0, got -1"),
        (GEMMA2_2B, {"attn_logit_softcapping": 0}, "attention_soft_cap must be a positive number, got 0"),
    ],
)
def test_refused(read, fields, changes, message):
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        read(fields, **changes)
