"""The parameters' layout, and the check that a file's tensors are exactly those its configuration implies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.config import TransformerConfig

type Params = dict[str, Any]
type Shape = tuple[int, ...]

_MAX_LISTED = 12  # tensors named per kind of mismatch; a wrong configuration would name hundreds


def top_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shapes of the arrays outside the layers; "head" only if the model has one of its own."""
    shapes: dict[str, Shape] = {
        "embed": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shapes of one layer's arrays; every weight is [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    return shapes


def check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype that parameters are to have.

    Raises:
      ValueError: it is neither float32 nor bfloat16.
    """
    resolved = np.dtype(dtype)
    if resolved not in (np.dtype(jnp.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype must be jnp.float32 or jnp.bfloat16, got {resolved.name}")
    return resolved


def build_params(
    config: TransformerConfig,
    names: Mapping[str, str],
    found: Mapping[str, Shape],
    read: Callable[[str, str], jax.Array],
    source: str,
) -> Params:
    """Reads every parameter of a model, after checking the names and shapes of all of them.

    Args:
      config: the model's shapes.
      names: for each key of `top_shapes` and `layer_shapes` the tensor's name in the file, where "{layer}"
        stands for the layer's number.
      found: the shapes, [out, in], of all tensors in the file, less those that the model does not use.
      read: gives the array for (key, name in the file); called once per tensor, in the model's order.
      source: the file, for the error.

    Returns:
      {"embed": [V, E], "layers": [{"attn_norm": [E], "q": [H * D, E], "k": [KVH * D, E], "v": [KVH * D, E],
      "o": [E, H * D], "mlp_norm": [E], "gate": [F, E], "up": [F, E], "down": [E, F]}, ...],
      "final_norm": [E]}, and "head": [V, E] unless `config.tie_word_embeddings`. A layer also has "q_bias",
      "k_bias", "v_bias" with `config.qkv_bias`, "q_norm", "k_norm" [D] with `config.qk_norm`, and
      "attn_post_norm", "mlp_post_norm" [E] with `config.post_norms`.

    Raises:
      ValueError: tensors are missing, unexpected or of another shape; the message lists them.
    """
    if config.num_layers > len(found):
        raise ValueError(
            f"{source}: its configuration describes {config.num_layers} layers, but it holds only {len(found)} tensors"
        )
    top, layer_keys = top_shapes(config), layer_shapes(config)
    expected = {names[key]: shape for key, shape in top.items()}
    for layer in range(config.num_layers):
        expected |= {names[key].format(layer=layer): shape for key, shape in layer_keys.items()}
    _check_tensors(expected, found, source)

    params: Params = {key: read(key, names[key]) for key in top}
    params["layers"] = [
        {key: read(key, names[key].format(layer=layer)) for key in layer_keys} for layer in range(config.num_layers)
    ]
    return params


def _check_tensors(expected: Mapping[str, Shape], found: Mapping[str, Shape], source: str) -> None:
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])} and should be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{kind} ({len(items)}): {_listed(items)}"
        for kind, items in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if items
    ]
    if problems:
        raise ValueError(
            f"{source}: its tensors are not those of the model its configuration describes. "
            + "; ".join(problems)
            + ". The file may be incomplete, or hold another architecture."
        )


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
