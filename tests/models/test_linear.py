import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.linear import linear


@pytest.mark.parametrize("rows", [1, 7, 64, 65])
@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_the_product(rows, dtype, out_dtype):
    rng = np.random.default_rng(rows)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, 48), (40, 48)))
    got = jax.jit(linear, static_argnames="out_dtype")(x, weight, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # 48 roundings of the sum in float32, and one of the result.
    bound = 48 * 2.0**-24 * np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    bound += np.abs(exact) * (2.0**-8 if got.dtype == jnp.bfloat16 else 0)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_only_a_cpu_has_the_weight_on_the_left_in_float32(platform, dtype):
    x, weight = jnp.zeros((8, 48), dtype), jnp.zeros((40, 48), dtype)
    text = jax.jit(linear).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == (platform == "cpu" and dtype == jnp.float32)
    assert text.count("dot_general") == 1
