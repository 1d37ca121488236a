"""Reads the configuration and the weights of a Hugging Face folder (config.json and *.safetensors)."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from models.config import Llama3RopeScaling, TransformerConfig
from models.weights.params import Params, Shape, build_params, check_dtype

_LAYER = "model.layers.{layer}."
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def load(folder: Path, *, dtype: DTypeLike = jnp.float32) -> tuple[TransformerConfig, Params]:
    """Reads a model of the Llama family, tensor by tensor.

    Args:
      folder: holds config.json, and model.safetensors or model.safetensors.index.json with its shards.
      dtype: of every parameter, jnp.float32 or jnp.bfloat16.

    Returns:
      The configuration and the parameters (see `models.weights.params.build_params`).

    Raises:
      FileNotFoundError: a file of the checkpoint is not in the folder.
      ValueError: the dtype, the architecture, a field of config.json or a tensor is not supported or missing.
    """
    target = check_dtype(dtype)
    config = read_config(folder)
    paths = _weight_paths(folder)
    with ExitStack() as stack:
        try:
            # "flax" gives jax arrays, bfloat16 included, whatever the version of safetensors.
            files = [stack.enter_context(safe_open(path, framework="flax")) for path in paths]
        except SafetensorError as error:
            raise ValueError(f"{folder}: a .safetensors file is damaged ({error}); get it again") from error
        found: dict[str, Shape] = {}
        holder: dict[str, Any] = {}
        for file in files:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if _is_unused(name, config):
                    continue
                header = file.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise ValueError(f"{folder}: tensor {name} is stored as {header.get_dtype()}; readable: {_DTYPES}")
                found[name], holder[name] = tuple(header.get_shape()), file

        def read(_: str, name: str) -> jax.Array:
            array: jax.Array = holder[name].get_tensor(name)
            return array.astype(target)

        return config, build_params(config, _NAMES, found, read, str(folder))


def read_config(folder: Path) -> TransformerConfig:
    """The model's shapes and constants, from config.json as transformers 4 or 5 writes it.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: the architecture or a field is not supported, or a field is missing.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a Hugging Face model folder")
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    _check_architecture(fields, path)
    _check_plain_llama(fields, path)

    def required(name: str) -> int:
        if not isinstance(fields.get(name), int):
            raise ValueError(f"{path}: the field {name} must be an integer, got {fields.get(name)!r}")
        return int(fields[name])

    hidden_size, num_heads = required("hidden_size"), required("num_attention_heads")
    theta, scaling = _rope(fields, path)
    return TransformerConfig(
        vocab_size=required("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required("intermediate_size"),
        num_layers=required("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or hidden_size // num_heads,
        max_model_len=required("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),  # 1e-6: what transformers assumes
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
    )


def _check_architecture(fields: Mapping[str, Any], path: Path) -> None:
    architectures = fields.get("architectures") or ["LlamaForCausalLM"]
    model_type = fields.get("model_type")
    if architectures != ["LlamaForCausalLM"] or model_type != "llama":
        raise ValueError(
            f"{path}: architecture {', '.join(architectures)} (model_type {model_type!r}) is not supported; "
            "supported: LlamaForCausalLM (model_type 'llama')"
        )


def _check_plain_llama(fields: Mapping[str, Any], path: Path) -> None:
    rope = fields.get("rope_parameters") or {}
    only = {
        "attention_bias": (fields.get("attention_bias"), False),
        "mlp_bias": (fields.get("mlp_bias"), False),
        "hidden_act": (fields.get("hidden_act"), "silu"),
        "partial_rotary_factor": (fields.get("partial_rotary_factor"), 1.0),
        "rope_parameters.partial_rotary_factor": (rope.get("partial_rotary_factor"), 1.0),
        "quantization_config": (fields.get("quantization_config"), None),
    }
    for name, (value, allowed) in only.items():
        if value is not None and value != allowed:
            raise ValueError(f"{path}: {name} = {value!r} is not supported; it must be {allowed!r} or absent")


def _rope(fields: Mapping[str, Any], path: Path) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling; "rope_parameters" (transformers 5) holds both, "rope_scaling" only the latter."""
    where = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = fields.get(where) or {}
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ValueError(f"{path}: {where}.rope_type = {rope_type!r} is not supported; supported: 'default', 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{path}: {where} lacks {', '.join(missing)}, which rope_type 'llama3' needs")
    factor, low, high, original = (rope[name] for name in names)
    return theta, Llama3RopeScaling(float(factor), float(low), float(high), int(original))


def _weight_paths(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {_WEIGHTS} nor {_INDEX}; weights in other formats must be converted first"
        )
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    names = sorted(set(index["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, named in {_INDEX}; get the whole checkpoint")
    return [folder / name for name in names]


def _is_unused(name: str, config: TransformerConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == _NAMES["head"])
