"""Indices of ragged batches: lists of unequal length, packed one after the other."""

import jax.numpy as jnp
from jax import Array


def owner(ends: Array, item: Array) -> Array:
    """The list that holds each packed item, int32 in item's shape, when list i ends before item `ends[i]`.

    Items past the end are given to the last list, so that the result is always an index.
    """
    return jnp.minimum((item[..., None] >= ends).sum(axis=-1, dtype=jnp.int32), ends.shape[0] - 1)
