"""What the kernels' online softmaxes share. Logits are in units of log 2, since exp2 is what the hardware has."""

import math
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
from jax import Array

FLOOR: Final = -1e30
"""Below every logit and finite, so that differences with it are not NaN."""

LOG2E: Final = math.log2(math.e)


def log2_logits(scale: Any, soft_cap: float | None) -> Callable[[Any], Any]:
    """The function from q k^T to scaled, capped logits over log 2."""
    if soft_cap is None:
        return lambda products: products * (scale * LOG2E)

    def capped(products: Any) -> Any:
        # cap * tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)): the hardware's tanh has 11 bits only.
        grown = jnp.exp2(products * (scale * (2.0 * LOG2E / soft_cap)))
        return LOG2E * soft_cap - (2.0 * LOG2E * soft_cap) / (1.0 + grown)

    return capped


def combine(acc: Array, peak: Array, total: Array, axis: int) -> tuple[Array, Array]:
    """Joins the splits along `axis`: acc = sum of weights times values, total = sum of weights, both over 2**peak.

    Returns (out, lse), lse in natural units; zeros and -inf where total is 0.
    """
    highest = peak.max(axis=axis, keepdims=True)
    decay = jnp.exp2(peak - highest)
    total = (total * decay).sum(axis=axis)
    out = (acc * decay).sum(axis=axis) / jnp.where(total > 0, total, 1.0)
    lse = (jnp.squeeze(highest, axis) + jnp.log2(total)) / LOG2E
    return out, jnp.where(total > 0, lse, -jnp.inf)
