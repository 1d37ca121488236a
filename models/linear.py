"""x @ weight^T, in the order of operands that the platform computes fastest."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_MAX_COLUMNS = 64
_MIN_BFLOAT16_ROWS = 8  # XLA:CPU computes bfloat16 products of fewer rows one number at a time


def linear(x: Array, weight: Array, out_dtype: DTypeLike | None = None) -> Array:
    """x[rows, in] times weight[out, in]: [rows, out] in out_dtype, by default x's."""
    rows, dtype = x.shape[0], jnp.dtype(out_dtype or x.dtype)
    product = partial(_weight_second, dtype=dtype)
    if x.dtype == weight.dtype == dtype == jnp.float32 and rows <= _MAX_COLUMNS:
        return lax.platform_dependent(x, weight, cpu=_weight_first, default=product)
    if x.dtype == jnp.bfloat16 and rows < _MIN_BFLOAT16_ROWS:
        return lax.platform_dependent(x, weight, cpu=partial(_padded, product), default=product)
    return product(x, weight)


def _padded(product: Callable[[Array, Array], Array], x: Array, weight: Array) -> Array:
    rows = x.shape[0]
    return product(jnp.pad(x, ((0, _MIN_BFLOAT16_ROWS - rows), (0, 0))), weight)[:rows]


def _weight_second(x: Array, weight: Array, *, dtype: DTypeLike) -> Array:
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=dtype)


def _weight_first(x: Array, weight: Array) -> Array:
    """weight @ x^T. XLA:CPU rearranges a product's right operand before it multiplies; with few rows that takes longer
    than the product itself, so that the weight is better on the left. The barriers keep XLA from turning it around.

    In bfloat16 a model gains nothing by it."""
    columns = lax.optimization_barrier(x.T)
    out = jnp.einsum("oi,it->ot", weight, columns, preferred_element_type=x.dtype)
    return lax.optimization_barrier(out).T
