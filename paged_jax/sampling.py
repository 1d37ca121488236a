"""Choosing the next token from logits."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def greedy(logits: Float[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """The token with the largest logit, the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
