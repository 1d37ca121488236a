"""Reads the configuration and the weights of a GGUF file (llama.cpp's format)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from jax.typing import DTypeLike
from numpy.typing import NDArray

from models.config import LinearRopeScaling, Llama3RopeScaling, TransformerConfig
from models.fields import Fields
from models.weights.gguf_file import GGUFFile, GGUFTensor
from models.weights.params import Params, build_params, check_dtype

_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{layer}.attn_norm.weight",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "o": "blk.{layer}.attn_output.weight",
    "q_bias": "blk.{layer}.attn_q.bias",
    "k_bias": "blk.{layer}.attn_k.bias",
    "v_bias": "blk.{layer}.attn_v.bias",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
}
# By architecture: what it has beyond Llama's. Mistral's files call themselves llama.
_ARCHITECTURES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
_ROPE_DIVISORS = "rope_freqs.weight"
_ROWS_AT_ONCE = 16  # rows joined before dequantising: half the time, since gguf works in groups of rows
# The file holds one divisor per frequency; these are the settings that Meta has published.
_LLAMA3_ROPE = tuple(Llama3RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0))


def load(file: GGUFFile, *, dtype: DTypeLike = jnp.float32) -> tuple[TransformerConfig, Params]:
    """Reads a model of the Llama or Qwen family; tensors are dequantised one at a time, in float32, then cast.

    Args:
      file: the open file.
      dtype: of every parameter, jnp.float32 or jnp.bfloat16.

    Returns:
      The configuration and the parameters (see `models.weights.params.build_params`). For the architecture "llama",
      llama.cpp stores the rows of q and k for a rotary embedding of neighbouring pairs; here they are back in the
      order of the original, for an embedding that pairs i with i + head_dim / 2.

    Raises:
      ValueError: the dtype, the architecture, a key, a tensor or a tensor's type is not supported or missing.
    """
    target = check_dtype(dtype)
    config = read_config(file)
    reordered = file.metadata["general.architecture"] == "llama"
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if reordered else {}

    def read(key: str, name: str) -> jax.Array:
        tensor = file.tensors[name]
        weight = _dequantize(name, tensor)
        if key in heads:
            weight = _half_split_rows(weight, heads[key])
        # On a CPU, device_put may share numpy's memory, and a float32 tensor is still a view of the file.
        is_view = tensor.type is GGMLQuantizationType.F32
        array: jax.Array = jax.device_put(weight.astype(target, copy=is_view))
        return array

    found = {name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_DIVISORS}
    return config, build_params(config, _NAMES, found, read, str(file.path))


def read_config(file: GGUFFile) -> TransformerConfig:
    """The model's shapes and constants, from the architecture's keys and the tensors' names.

    Raises:
      ValueError: the architecture is not supported, a key is missing, or a key asks for something unsupported.
    """
    try:
        return _config(file)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _config(file: GGUFFile) -> TransformerConfig:
    keys = Fields(file.metadata)
    name = keys.get("general.architecture")
    if name not in _ARCHITECTURES:
        supported = ", ".join(map(repr, _ARCHITECTURES))
        raise ValueError(f"architecture {name!r} is not supported; supported: {supported}")
    if keys.integer("split.count", 1) > 1:
        raise ValueError(
            f"it is one of {keys.integer('split.count')} parts (split.count); "
            "join them with `llama-gguf-split --merge` first"
        )
    embedding = file.tensors.get(_NAMES["embed"])
    if embedding is None:
        raise ValueError(f"there is no tensor {_NAMES['embed']}, so this is not a whole model")
    hidden_size = keys.integer(f"{name}.embedding_length")
    num_heads = keys.integer(f"{name}.attention.head_count")
    head_dim = keys.integer(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
    max_model_len = keys.integer(f"{name}.context_length")
    _check_only(keys, name, head_dim, max_model_len)
    theta = _shortest(keys.number(f"{name}.rope.freq_base", 10000.0))
    return TransformerConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer(f"{name}.feed_forward_length"),
        num_layers=keys.integer(f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=max_model_len,
        rope_theta=theta,
        rope_scaling=_linear_scaling(keys, name) or _llama3_scaling(file, head_dim, theta),
        rms_norm_eps=_shortest(keys.number(f"{name}.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings=_NAMES["head"] not in file.tensors,
        **_ARCHITECTURES[name],
    )


def _check_only(keys: Fields, name: str, head_dim: int, max_model_len: int) -> None:
    only: dict[str, Any] = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for key, allowed in only.items():
        value = keys.get(f"{name}.{key}")
        if value is not None and value != allowed:
            raise ValueError(f"{name}.{key} = {value!r} is not supported; it must be {allowed!r} or absent")
    window = keys.integer(f"{name}.attention.sliding_window", max_model_len)
    if window < max_model_len:
        raise ValueError(
            f"{name}.attention.sliding_window = {window} is not supported; use the model's Hugging Face folder, whose "
            "config.json says which layers have the window"
        )


def _linear_scaling(keys: Fields, name: str) -> LinearRopeScaling | None:
    kind = keys.text(f"{name}.rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind != "linear":
        raise ValueError(f"{name}.rope.scaling.type = {kind!r} is not supported; it must be 'none', 'linear' or absent")
    return LinearRopeScaling(_shortest(keys.number(f"{name}.rope.scaling.factor")))


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> Llama3RopeScaling | None:
    if _ROPE_DIVISORS not in file.tensors:
        return None
    divisors = _dequantize(_ROPE_DIVISORS, file.tensors[_ROPE_DIVISORS])
    if np.all(divisors == 1.0):
        return None
    for scaling in _LLAMA3_ROPE:
        standard = _llama3_divisors(scaling, head_dim, theta)
        if divisors.shape == standard.shape and np.allclose(divisors, standard, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{_ROPE_DIVISORS} (shape {list(divisors.shape)}, from {divisors.min():g} to "
        f"{divisors.max():g}) is not one of Llama 3's standard scalings (factor 8 or 32, low_freq_factor 1, "
        "high_freq_factor 4, original length 8192); use the Hugging Face folder of this model, whose "
        "config.json states the scaling"
    )


def _llama3_divisors(scaling: Llama3RopeScaling, head_dim: int, theta: float) -> NDArray[np.float64]:
    """The [head_dim / 2] divisors that llama.cpp's convert_hf_to_gguf.py writes for a scaling."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth))


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where the file's float32 reads 9.999999747e-06."""
    with np.errstate(over="ignore"):  # infinity is refused where it is used
        return float(str(np.float32(value)))


def _dequantize(name: str, tensor: GGUFTensor) -> NDArray[np.float32]:
    data, rows = tensor.data, tensor.shape[0]
    if len(tensor.shape) == 2 and rows % _ROWS_AT_ONCE == 0:
        data = data.reshape(rows // _ROWS_AT_ONCE, -1)  # blocks never cross rows, so this joins whole blocks
    try:
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number gives weights that are none
            return dequantize(data, tensor.type).reshape(tensor.shape)
    except NotImplementedError as error:
        readable = "F32, F16, BF16 and the quantised types of the gguf package"
        raise ValueError(f"tensor {name} is of type {tensor.type.name}; readable: {readable}") from error


def _half_split_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes llama.cpp's reordering of q's or k's rows; [heads * D, E] to [heads * D, E]."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)
