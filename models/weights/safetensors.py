"""Reads the weights of a Hugging Face folder (*.safetensors), as its config.json describes them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from models.config import TransformerConfig
from models.fields import Fields
from models.weights.hf_config import read_config
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
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "q_norm": _LAYER + "self_attn.q_norm.weight",
    "k_norm": _LAYER + "self_attn.k_norm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}
# With norms on both sides, the name of Llama's norm before the MLP is that of the one after attention.
_POST_NORM_NAMES = {
    "attn_post_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight",
}
__all__ = ["load", "read_config"]
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def load(folder: Path, *, dtype: DTypeLike = jnp.float32) -> tuple[TransformerConfig, Params]:
    """Reads a model, tensor by tensor.

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

        names = {**_NAMES, **_POST_NORM_NAMES} if config.post_norms else _NAMES
        return config, build_params(config, names, found, read, str(folder))


def _weight_paths(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {_WEIGHTS} nor {_INDEX}; weights in other formats must be converted first"
        )
    index = Fields.read(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(_is_file_name(name) for name in index.values()):
        raise ValueError(f"{folder / _INDEX}: weight_map must give the name of a file for each tensor; get it again")
    names = sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, named in {_INDEX}; get the whole checkpoint")
    return [folder / name for name in names]


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _is_unused(name: str, config: TransformerConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == _NAMES["head"])
