"""`write_kv` against NumPy, byte by byte."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax import Array

from pallas_kernels import write_kv
from scripts.kernels.cases import CONTRACT, SEED, Case, attend, build, check, oracle, same_bytes

PAGES, PAGE_SIZE, LAYERS, HEADS, DIM = 7, 4, 3, 3, 5

JITTED = jax.jit(write_kv)


def poisoned_pool(dtype: Any) -> npt.NDArray[Any]:
    """NaNs with all kinds of payloads, so that a rewritten NaN is seen."""
    dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(SEED)
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    nan = np.array(np.nan, dtype).view(bits)
    shape = (LAYERS * PAGES, PAGE_SIZE, HEADS * 2 * DIM)
    return (rng.integers(0, 32, shape).astype(bits) | nan).view(dtype)


def tokens(count: int, dtype: Any = np.float32) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(SEED + count)
    k, v = rng.standard_normal((2, count, HEADS, DIM)).astype(np.dtype(jnp.dtype(dtype)))
    return k, v


def by_numpy(
    pool: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], slots: list[int], layer: int
) -> npt.NDArray[Any]:
    pool = pool.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            page, offset = divmod(slot, PAGE_SIZE)
            for head in range(HEADS):
                lane = head * 2 * DIM
                pool[layer * PAGES + page, offset, lane : lane + DIM] = k[token, head].astype(pool.dtype)
                pool[layer * PAGES + page, offset, lane + DIM : lane + 2 * DIM] = v[token, head].astype(pool.dtype)
    return pool


SLOTS = {
    "one": [9],
    "first and last of a layer": [0, PAGES * PAGE_SIZE - 1],
    "permuted, across pages": [23, 4, 7, 26, 8, 5, 12],
    "dropped between": [-1, 11, -1, 6, -1],
    "dropped by any negative": [-2, -PAGE_SIZE, -PAGES * PAGE_SIZE, -(2**31), -1, 5],
    "all dropped": [-1, -1, -1],
    "none": [],
}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize(
    ("pool_dtype", "token_dtype"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")],
)
def test_writes_what_numpy_writes(pool_dtype: str, token_dtype: str, name: str, layer: int) -> None:
    """The named slots of one layer, rounded to the pool's dtype; every other byte of a NaN-filled pool stays."""
    slots = SLOTS[name]
    pool, (k, v) = poisoned_pool(pool_dtype), tokens(len(slots), token_dtype)
    arrays = map(jnp.asarray, (pool, k, v, np.asarray(slots, np.int32)))
    got = np.asarray(JITTED(*arrays, row_offset=jnp.int32(layer * PAGES)))
    assert same_bytes(got, by_numpy(pool, k, v, slots, layer)), f"repeat with PAGED_JAX_SEED={SEED}"
    if all(slot < 0 for slot in slots):
        assert same_bytes(got, pool)


def test_layer_is_an_operand() -> None:
    """One trace writes every layer, in a loop over them and one call at a time."""
    pool, (k, v) = poisoned_pool("float32"), tokens(4)
    slots = [5, -1, 27, 0]
    expected = pool
    for layer in range(LAYERS):
        expected = by_numpy(expected, k + layer, v, slots, layer)

    def write(pages: Array, k: Array, row_offset: Array) -> Array:
        return write_kv(pages, k, jnp.asarray(v), jnp.asarray(slots, jnp.int32), row_offset=row_offset)

    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(write, n=1))
    pages = jnp.asarray(pool)
    for layer in range(LAYERS):
        pages = jitted(pages, jnp.asarray(k + layer), jnp.int32(layer * PAGES))
    assert same_bytes(np.asarray(pages), expected)

    def body(layer: Array, pages: Array) -> Array:
        return write(pages, jnp.asarray(k) + layer.astype(jnp.float32), layer * jnp.int32(PAGES))

    pages = jax.jit(lambda pages: jax.lax.fori_loop(jnp.int32(0), jnp.int32(LAYERS), body, pages))(jnp.asarray(pool))
    assert same_bytes(np.asarray(pages), expected)


def test_donated_pool_is_reused() -> None:
    pool = jnp.asarray(poisoned_pool("float32"))
    k, v = tokens(1)
    address = pool.unsafe_buffer_pointer()
    written = jax.jit(write_kv, donate_argnames="kv_pages")(
        pool, jnp.asarray(k), jnp.asarray(v), jnp.array([3], jnp.int32), row_offset=jnp.int32(PAGES)
    )
    assert pool.is_deleted()
    assert written.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("implementation", CONTRACT)
def test_what_is_written_is_what_is_attended(implementation: str) -> None:
    """Writing and attending agree on the layout: a pool filled by `write_kv` alone gives the oracle's result."""
    case = Case(query_lens=(6, 1), seq_lens=(10, 5), num_layers=2, layer=1, num_pages=12, dtype="bfloat16")
    inputs = build(case)
    pages = jnp.full(inputs.kv_pages.shape, jnp.nan, jnp.bfloat16)
    for s, length in enumerate(case.seq_lens):
        position = np.arange(length)
        slots = inputs.block_tables[s, position // case.page_size] * case.page_size + position % case.page_size
        k, v = (jnp.asarray(x[s], jnp.float32) for x in (inputs.keys, inputs.values))
        pages = write_kv(pages, k, v, jnp.asarray(slots, jnp.int32), row_offset=inputs.row_offset)
    assert same_bytes(np.asarray(pages), inputs.kv_pages)
    out, lse = attend(case, inputs._replace(kv_pages=np.asarray(pages)), implementation)
    check(case, oracle(case, inputs), out, lse, implementation)
