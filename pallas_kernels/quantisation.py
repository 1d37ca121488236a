"""Quantised pools: 8-bit codes, with one float32 scale for each token's key and one for its value in each KV head."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

LARGEST: Final[Mapping[np.dtype, float]] = MappingProxyType(
    {np.dtype(dtype): largest for dtype, largest in ((jnp.int8, 127.0), (jnp.float8_e4m3fn, 448.0))}
)
"""Dtypes of quantised pools -> the code that the largest number of a head becomes (-128 is not used)."""

QUANTISED_DTYPES: Final = tuple(LARGEST)
"""Dtypes of pools that come with scales."""

_SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)  # so that a head of zeros divides


def quantise(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Codes and scales with `x` close to `codes * scales[..., None]`: symmetric, by the largest magnitude.

    A scale is max |x| / LARGEST[dtype] over the last axis, at least the smallest normal float32; codes are rounded to
    nearest, ties to even. So int8 is off by at most half a scale; float8_e4m3fn (3 bits of mantissa, subnormals below
    2**-6) by at most 2**-4 of the number or 2**-10 of the scale, whichever is more.

    Args:
      x: floating-point [..., head_dim]. A head that is not finite gives a scale that is not, and reads as NaN.
      dtype: a key of `LARGEST`.

    Returns:
      (codes, scales): [..., head_dim] in `dtype`, and float32 [...].
    """
    x = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(x).max(axis=-1) / LARGEST[np.dtype(dtype)], _SMALLEST_SCALE)
    codes = x / scales[..., None]
    return (jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes).astype(dtype), scales
