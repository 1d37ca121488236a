"""A step's products with the weights by themselves: what is left of a step when all else costs nothing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.linear import linear
from models.transformer import Params
from scripts.benchmarks.timing import time_call


def products(params: Params, rows: int) -> Callable[[], float]:
    """A function that multiplies `rows` rows by every matrix of the layers and by the head, one after another, and
    returns its milliseconds."""
    matrices = [weight for layer in params["layers"] for weight in layer.values() if weight.ndim == 2]
    head = params["head"] if "head" in params else params["embed"]
    rng = np.random.default_rng(0)
    inputs = {size: jnp.asarray(rng.standard_normal((rows, size)), head.dtype)
              for size in {matrix.shape[1] for matrix in (*matrices, head)}}  # fmt: skip

    @jax.jit
    def multiply(matrices: list[Array], head: Array, inputs: dict[int, Array]) -> Array:
        one = jnp.ones((), bool)
        for matrix, out_dtype in (*((matrix, None) for matrix in matrices), (head, jnp.float32)):
            x = inputs[matrix.shape[1]]
            # All of the product is computed, and only then the next one.
            out = jax.lax.optimization_barrier(linear(x * one.astype(x.dtype), matrix, out_dtype))
            one = jnp.isfinite(out[0, 0])
        return one

    return lambda: 1e3 * time_call(lambda: multiply(matrices, head, inputs).block_until_ready())
