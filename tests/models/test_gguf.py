"""The GGUF reader, against weights written by the gguf package."""

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from models.config import LinearRopeScaling, Llama3RopeScaling, TransformerConfig
from models.weights import gguf, safetensors
from models.weights.gguf_file import GGUFFile
from tests.tiny_checkpoint import TinyModel

DATA = Path(__file__).parents[1] / "data" / "tiny"

CONFIG = TransformerConfig(
    vocab_size=262,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=128,
    rope_theta=50000.0,
    rms_norm_eps=1e-5,
)


def load(path, dtype=jnp.float32):
    return gguf.load(GGUFFile.open(path), dtype=dtype)


def rotate(x, position, theta, *, interleaved):
    """One head's vector [D], turned to its position, with either pairing of its numbers."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return out


def test_config(tiny, tmp_path):
    config, _ = load(tiny.write_gguf(tmp_path / "m.gguf"))
    assert config == CONFIG


def test_params(tiny, tmp_path):
    _, params = load(tiny.write_gguf(tmp_path / "m.gguf"))
    assert set(params) == {"embed", "layers", "final_norm", "head"}
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["embed"], tiny.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], tiny.tensors["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for layer, arrays in enumerate(params["layers"]):
        assert set(arrays) == set(names)
        for key, name in names.items():
            np.testing.assert_array_equal(arrays[key], tiny.tensors[f"model.layers.{layer}.{name}.weight"])


def test_rows_of_q_and_k_suit_the_half_split_rotary_embedding(tiny, tmp_path):
    """llama.cpp turns neighbouring pairs of the stored rows; the scores must not depend on the pairing."""
    file = GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf"))
    config, params = gguf.load(file)
    x = np.random.default_rng(1).standard_normal((2, config.hidden_size))
    scores = {}
    for interleaved in (True, False):
        weights = {}
        for key in "qk":
            stored = file.tensors[f"blk.0.attn_{key}.weight"]
            raw = stored.data.view(np.float32).reshape(stored.shape)
            weights[key] = (raw if interleaved else np.asarray(params["layers"][0][key])).astype(np.float64)
        q = (weights["q"] @ x[0]).reshape(config.num_heads, config.head_dim)
        k = (weights["k"] @ x[1]).reshape(config.num_kv_heads, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        scores[interleaved] = [
            rotate(q[head], 11, config.rope_theta, interleaved=interleaved)
            @ rotate(k[head // group], 4, config.rope_theta, interleaved=interleaved)
            for head in range(config.num_heads)
        ]
    np.testing.assert_allclose(scores[False], scores[True], rtol=1e-12)
    assert not np.allclose(file.tensors["blk.0.attn_q.weight"].data.view(np.float32), params["layers"][0]["q"])


def test_tied_head_has_no_array(tiny, tmp_path):
    del tiny.tensors["lm_head.weight"]
    config, params = load(tiny.write_gguf(tmp_path / "m.gguf"))
    assert config.tie_word_embeddings
    assert "head" not in params


def test_key_length_and_missing_kv_heads(tiny, tmp_path):
    tiny.keys |= {"llama.attention.key_length": 8, "llama.attention.head_count_kv": None}
    tiny.keys |= {"llama.rope.freq_base": None}
    config = gguf.read_config(GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf")))
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (8, 4, 10000.0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_stored_types(tiny, tmp_path, kind):
    """Every element is what the gguf package makes of the stored bytes."""
    _, params = load(tiny.write_gguf(tmp_path / "m.gguf", kind))
    stored = gguf_package.GGMLQuantizationType[kind]
    for key, name in (("v", "self_attn.v_proj"), ("down", "mlp.down_proj")):
        original = tiny.tensors[f"model.layers.1.{name}.weight"]
        quantised = gguf_package.quants.quantize(original, stored)
        expected = gguf_package.quants.dequantize(quantised, stored)
        np.testing.assert_array_equal(params["layers"][1][key], expected)


def four_k(d, smallest, scales, j):
    """Scale and offset of sub-block j of Q4_K and Q5_K, from the twelve bytes that hold eight of each in six bits."""
    if j < 4:
        scale, offset = scales[j] & 63, scales[j + 4] & 63
    else:
        scale = scales[j + 4] & 15 | scales[j - 4] >> 6 << 4
        offset = scales[j + 4] >> 4 | scales[j] >> 6 << 4
    return d * scale, smallest * offset


def q4_k(block):
    d, smallest = np.frombuffer(block[:4], np.float16).astype(float)
    out = []
    for j in range(8):
        scale, offset = four_k(d, smallest, block[4:16], j)
        out += [scale * (block[16 + j // 2 * 32 + i] >> j % 2 * 4 & 15) - offset for i in range(32)]
    return out


def q5_k(block):
    d, smallest = np.frombuffer(block[:4], np.float16).astype(float)
    out = []
    for j in range(8):
        scale, offset = four_k(d, smallest, block[4:16], j)
        for i in range(32):
            low, high = block[48 + j // 2 * 32 + i] >> j % 2 * 4 & 15, block[16 + i] >> j & 1
            out.append(scale * (low + 16 * high) - offset)
    return out


def q6_k(block):
    (d,) = np.frombuffer(block[208:210], np.float16).astype(float)
    scales = np.frombuffer(block[192:208], np.int8).astype(int)
    out = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        low = block[half * 64 + quarter % 2 * 32 + place] >> quarter // 2 * 4 & 15
        high = block[128 + half * 32 + place] >> quarter * 2 & 3
        out.append(d * scales[i // 16] * (low + 16 * high - 32))
    return out


@pytest.mark.parametrize(("kind", "size", "decode"), [("Q4_K", 144, q4_k), ("Q5_K", 176, q5_k), ("Q6_K", 210, q6_k)])
def test_k_quants(tiny, tmp_path, kind, size, decode):
    """Against the blocks' layout in ggml-common.h, one number at a time. The package does not write these types."""
    tiny.fields["intermediate_size"] = 256
    for layer in range(2):
        for name, shape in (("gate", (256, 32)), ("up", (256, 32)), ("down", (32, 256))):
            tiny.tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = np.zeros(shape, np.float32)
    rows = np.random.default_rng(0).integers(0, 256, (32, size), np.uint8)
    halves = np.random.default_rng(1).uniform(0.01, 1, (32, 2)).astype(np.float16).view(np.uint8)
    at = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
    rows[:, at] = halves[:, : at.stop - at.start]
    path = tiny.write_gguf(tmp_path / "m.gguf", stored_as={"blk.1.ffn_down.weight": (kind, rows)})
    _, params = load(path)
    expected = [decode(row.tobytes()) for row in rows]
    np.testing.assert_allclose(params["layers"][1]["down"], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen(name, tmp_path):
    """The same as from the folder that transformers wrote: no row moves, biases and norms are there."""
    folder = DATA / name
    tensors = {key: np.asarray(array, np.float32) for key, array in load_file(folder / "model.safetensors").items()}
    fields = json.loads((folder / "config.json").read_text())
    tiny = TinyModel(fields, tensors, architecture=name)
    if "head_dim" in fields:
        tiny.keys = {"llama.attention.key_length": fields["head_dim"]}
    config, params = load(tiny.write_gguf(tmp_path / "m.gguf"))
    expected_config, expected = safetensors.load(folder)
    assert config == replace(expected_config, sliding_windows=None)  # which GGUF files of these do not have
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_linear_rope_scaling(tiny, tmp_path):
    tiny.keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    assert gguf.read_config(GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf"))).rope_scaling == LinearRopeScaling(2.5)


def test_window_as_long_as_the_context_is_none(tiny, tmp_path):
    tiny.keys["llama.attention.sliding_window"] = 128
    assert gguf.read_config(GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf"))).sliding_windows is None


def test_bfloat16_params(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    (_, exact), (_, rounded) = load(path), load(path, jnp.bfloat16)
    for x, y in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.astype(jnp.bfloat16), y)


def test_params_do_not_alias_the_file(tiny, tmp_path):
    tiny.keys["general.alignment"] = 64  # what JAX needs in order to share memory
    path = tiny.write_gguf(tmp_path / "m.gguf")
    _, params = load(path)
    before = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    with path.open("r+b") as handle:
        handle.write(b"\xff" * path.stat().st_size)
    for x, y in zip(before, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y)


def llama3_divisors(scaling, head_dim, theta):
    """The loop of llama.cpp's convert_hf_to_gguf.py."""
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling.factor)
        else:
            smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered(tiny, tmp_path, factor):
    scaling = Llama3RopeScaling(factor, 1.0, 4.0, 8192)
    extra = {"rope_freqs.weight": llama3_divisors(scaling, 8, 50000.0)}
    config, _ = load(tiny.write_gguf(tmp_path / "m.gguf", extra=extra))
    assert config == replace(CONFIG, rope_scaling=scaling)


def test_rope_divisors_of_one_are_no_scaling(tiny, tmp_path):
    config, _ = load(tiny.write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(4, np.float32)}))
    assert config.rope_scaling is None


@pytest.mark.parametrize("divisors", [[1, 1, 2, 4], [1, 1, 8]])
def test_other_rope_divisors_are_refused(tiny, tmp_path, divisors):
    path = tiny.write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.array(divisors, np.float32)})
    with pytest.raises(ValueError, match=r"rope_freqs.weight .*factor 8 or 32.*Hugging Face folder"):
        load(path)


def test_other_architecture(tiny, tmp_path):
    tiny.architecture = "phi3"
    message = r"m.gguf: architecture 'phi3' is not supported; supported: 'llama', 'qwen2', 'qwen3'"
    with pytest.raises(ValueError, match=message):
        load(tiny.write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count must be an integer, got None"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count must be an integer, got \[4, 4\]"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported; it must be 0"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type = 'yarn' is not supported; it must be 'none'"),
        ({"llama.rope.dimension_count": 4}, "dimension_count = 4 is not supported; it must be 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window = 64 is not supported; use .* Hugging Face folder"),
        ({"llama.block_count": 3_000_000_000}, "num_layers must be .* at most 10,000, got 3000000000"),
        ({"llama.block_count": 5_000}, "describes 5000 layers, but it holds only 21 tensors"),
        ({"llama.attention.head_count": 0}, "num_heads must be at least 1"),
        ({"llama.rope.freq_base": -1.0}, r"rope_theta must be a positive number, got -1.0"),
        ({"split.count": 3}, "one of 3 parts .* --merge"),
    ],
)
def test_unsupported_keys(tiny, tmp_path, keys, message):
    tiny.keys |= keys
    with pytest.raises(ValueError, match=message):
        load(tiny.write_gguf(tmp_path / "m.gguf"))


def test_missing_extra_and_misshapen_tensors_are_listed_together(tiny, tmp_path):
    del tiny.tensors["model.norm.weight"]
    tiny.tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    tiny.tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((48, 32), np.float32)
    with pytest.raises(ValueError) as error:
        load(tiny.write_gguf(tmp_path / "m.gguf"))
    assert "missing (1): output_norm.weight;" in str(error.value)
    assert "unexpected (1): blk.0.attn_q.bias;" in str(error.value)
    assert "wrong shape (1): blk.1.ffn_up.weight is [48, 32] and should be [64, 32]" in str(error.value)


def test_long_lists_are_cut(tiny, tmp_path):
    tiny.fields["num_hidden_layers"] = 6
    with pytest.raises(ValueError, match=r"missing \(36\): blk\.2\.attn_norm\.weight, .* and 24 more"):
        load(tiny.write_gguf(tmp_path / "m.gguf"))


def test_no_embedding(tiny, tmp_path):
    del tiny.tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"no tensor token_embd.weight"):
        load(tiny.write_gguf(tmp_path / "m.gguf"))


def test_unreadable_tensor_type(tiny, tmp_path):
    tiny.tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ValueError, match=r"output_norm.weight is of type I8; readable: F32"):
        load(tiny.write_gguf(tmp_path / "m.gguf"))


def test_dtype(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"jnp.float32 or jnp.bfloat16, got float16"):
        load(tiny.write_gguf(tmp_path / "m.gguf"), jnp.float16)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04" + bytes(40), b"GGUF" + (1).to_bytes(4, "little") + bytes(40), b"G", b""]
)
def test_files_that_are_no_gguf(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"m.gguf is not a GGUF file of version 2 or 3, or it is damaged"):
        GGUFFile.open(path)


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.99])
def test_file_cut_short(tiny, tmp_path, kept):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match="cut short"):
        GGUFFile.open(path)


def test_metadata_values(tiny, tmp_path):
    tiny.keys |= {"a.bool": True, "a.float": 0.5, "a.text": "日本", "a.bools": [True, False], "general.alignment": 64}
    metadata = GGUFFile.open(tiny.write_gguf(tmp_path / "m.gguf", "Q8_0")).metadata
    assert (metadata["a.bool"], metadata["a.float"], metadata["a.text"]) == (True, 0.5, "日本")
    assert metadata["a.bools"] == [True, False]


def test_smollm2(smollm2_path):
    config, params = load(smollm2_path, jnp.bfloat16)
    assert config == TransformerConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_model_len=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
