"""The reader of Hugging Face folders."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

from models.config import Llama3RopeScaling
from models.weights import gguf, safetensors
from models.weights.gguf_file import GGUFFile

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def assert_same(params, expected):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def read_config(tiny, folder):
    tiny.write_config(folder)
    return safetensors.read_config(folder)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_formats_give_the_same(tiny, tmp_path, dtype):
    config, params = safetensors.load(tiny.write_folder(tmp_path / "hf"), dtype=dtype)
    file = GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf"))
    other_config, other = gguf.load(file, dtype=dtype)
    assert config == other_config
    assert_same(params, other)


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_half_precision_files(tiny, tmp_path, stored):
    tiny.tensors = {name: jnp.asarray(array, stored) for name, array in tiny.tensors.items()}
    folder = tiny.write_folder(tmp_path, save=save_jax)
    for dtype in (jnp.float32, jnp.bfloat16):
        _, params = safetensors.load(folder, dtype=dtype)
        expected = tiny.tensors["model.layers.1.self_attn.q_proj.weight"].astype(dtype)
        assert params["layers"][1]["q"].dtype == dtype
        np.testing.assert_array_equal(params["layers"][1]["q"], expected)
        np.testing.assert_array_equal(params["final_norm"], tiny.tensors["model.norm.weight"].astype(dtype))


def test_shards(tiny, tmp_path):
    config, params = safetensors.load(tiny.write_shards(tmp_path / "shards"))
    other_config, other = safetensors.load(tiny.write_folder(tmp_path / "one"))
    assert config == other_config
    assert_same(params, other)


def test_missing_shard(tiny, tmp_path):
    folder = tiny.write_shards(tmp_path)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-2.safetensors, named in .*index.json"):
        safetensors.load(folder)


def test_index_without_files(tiny, tmp_path):
    folder = tiny.write_shards(tmp_path)
    for content in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": "../b.safetensors"}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"index.json: weight_map must give the name of a file for each tensor"):
            safetensors.load(folder)


def test_more_layers_than_tensors(tiny, tmp_path):
    tiny.fields["num_hidden_layers"] = 5_000
    with pytest.raises(ValueError, match=r"describes 5000 layers, but it holds only 21 tensors"):
        safetensors.load(tiny.write_folder(tmp_path))


def test_no_weights(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor .* must be converted"):
        safetensors.load(folder)


def test_damaged_weights(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        safetensors.load(folder)


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json; give a Hugging Face model folder"):
        safetensors.load(tmp_path)


def test_tied_head_is_ignored(tiny, tmp_path):
    tiny.fields["tie_word_embeddings"] = True
    config, params = safetensors.load(tiny.write_folder(tmp_path))
    assert config.tie_word_embeddings
    assert "head" not in params


def test_rotary_buffers_are_ignored(tiny, tmp_path):
    tiny.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.load(tiny.write_folder(tmp_path))


def test_missing_extra_and_misshapen_tensors_are_listed_together(tiny, tmp_path):
    del tiny.tensors["lm_head.weight"]
    tiny.tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    tiny.tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((32, 48), np.float32)
    with pytest.raises(ValueError) as error:
        safetensors.load(tiny.write_folder(tmp_path))
    assert "missing (1): lm_head.weight;" in str(error.value)
    assert "unexpected (1): model.layers.0.self_attn.q_norm.weight;" in str(error.value)
    assert "mlp.down_proj.weight is [32, 48] and should be [32, 64]" in str(error.value)


def test_unreadable_tensor_type(tiny, tmp_path):
    tiny.tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ValueError, match=r"model.norm.weight is stored as I8; readable: .*BF16"):
        safetensors.load(tiny.write_folder(tmp_path, save=save_file))


def test_dtype(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"jnp.float32 or jnp.bfloat16, got float64"):
        safetensors.load(tiny.write_folder(tmp_path), dtype=np.float64)


def test_defaults(tiny, tmp_path):
    for name in ("num_key_value_heads", "rope_theta", "rms_norm_eps", "architectures"):
        del tiny.fields[name]
    tiny.fields["pretraining_tp"] = 2
    config = read_config(tiny, tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    tiny.fields["head_dim"] = 16
    assert read_config(tiny, tmp_path).head_dim == 16


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_of_transformers_4(tiny, tmp_path, type_key):
    tiny.fields["rope_scaling"] = {type_key: "llama3", **LLAMA3}
    config = read_config(tiny, tmp_path)
    assert config.rope_theta == 50000.0
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def test_rope_of_transformers_5(tiny, tmp_path):
    del tiny.fields["rope_theta"]
    tiny.fields["rope_parameters"] = {"rope_theta": 7000.0, "rope_type": "default"}
    config = read_config(tiny, tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (7000.0, None)
    tiny.fields["rope_parameters"] |= {"rope_type": "llama3", **LLAMA3}
    config = read_config(tiny, tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (7000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported; it must be False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it must be 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; it must be 1.0"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5 is not supported",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type = 'dynamic' is not supported; supported: 'default', 'linear', 'llama3'",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.low_freq_factor must be a number, got None",
        ),
        ({"vocab_size": None}, "vocab_size must be an integer, got None"),
    ],
)
def test_unsupported_fields(tiny, tmp_path, fields, message):
    tiny.fields |= fields
    with pytest.raises(ValueError, match=message):
        read_config(tiny, tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, "Phi3ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma'"),
    ],
)
def test_other_architectures(tiny, tmp_path, fields, named):
    tiny.fields |= fields
    with pytest.raises(ValueError, match=rf"architecture .*{named}.* is not supported; .*LlamaForCausalLM"):
        read_config(tiny, tmp_path)


def test_config_is_utf8(tiny, tmp_path):
    tiny.fields["_name_or_path"] = "モデル"
    (tmp_path / "config.json").write_text(json.dumps(tiny.fields, ensure_ascii=False), encoding="utf-8")
    assert safetensors.read_config(tmp_path).num_layers == 2
