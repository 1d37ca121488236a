"""What is traced and what is static: scans over layers, decode loops, the optional arguments, log-sum-exps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from pallas_kernels import default_implementation, paged_attention, write_kv
from scripts.kernels.cases import (
    ACCUMULATION,
    CONTRACT,
    NO_WINDOW,
    Case,
    attend,
    build,
    check,
    operands,
    oracle,
    same_bytes,
)

MIXED = Case(query_lens=(1, 5, 1, 4), seq_lens=(9, 11, 3, 4), padding_seqs=1, padding_rows=2, max_query_len=8)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_scan_over_layers(implementation: str) -> None:
    """One program for all layers: row_offset is the scan's operand and every layer holds other values."""
    case = replace(MIXED, num_layers=3, num_pages=20)
    layers = [build(replace(case, layer=layer)) for layer in range(3)]
    rows = np.arange(3 * 20) // 20
    pool = np.select([(rows == layer)[:, None, None] for layer in range(3)], [x.kv_pages for x in layers])
    q, _, *tables = operands(layers[0])

    @jax.jit
    def run(q: Array, kv_pages: Array) -> tuple[Array, Array]:
        def layer(_: None, index: Array) -> tuple[None, tuple[Array, Array]]:
            return None, paged_attention(
                q, kv_pages, *tables, row_offset=index * jnp.int32(20), num_kv_heads=case.num_kv_heads,
                scale=case.scale, max_query_len=8, return_lse=True, implementation=implementation,
            )  # fmt: skip

        return jax.lax.scan(layer, None, jnp.arange(3, dtype=jnp.int32))[1]

    out, lse = map(np.asarray, run(q, jnp.asarray(pool)))
    for layer in range(3):
        check(case, oracle(case, layers[layer]), out[layer], lse[layer], f"{implementation}, layer {layer}")


@pytest.mark.parametrize("implementation", CONTRACT)
def test_decode_loop_equals_prefill(implementation: str) -> None:
    """A while_loop that writes one token and attends, the pool in its carry, gives what one prefill gives."""
    case = Case(query_lens=(13,), seq_lens=(13,), num_layers=2, layer=1, num_pages=8)
    inputs = build(case)
    q, full, table, _, _ = operands(inputs)
    k, v = (jnp.asarray(x[0], jnp.float32) for x in (inputs.keys, inputs.values))

    @jax.jit
    def run(pages: Array) -> tuple[Array, Array, Array, Array]:
        def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            i, pages, out, lse = carry
            slot = table[0, i // 4] * 4 + i % 4
            pages = write_kv(pages, k[i][None], v[i][None], slot[None], row_offset=inputs.row_offset)
            new_out, new_lse = paged_attention(
                q[i][None], pages, table, i[None] + 1, jnp.array([0, 1], jnp.int32), row_offset=inputs.row_offset,
                num_kv_heads=2, scale=case.scale, max_query_len=1, return_lse=True, implementation=implementation,
            )  # fmt: skip
            return i + 1, pages, out.at[i].set(new_out[0]), lse.at[i].set(new_lse[0])

        start = (jnp.int32(0), pages, jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32))
        return jax.lax.while_loop(lambda carry: carry[0] < 13, step, start)

    _, pages, out, lse = run(jnp.full_like(full, jnp.nan))
    assert same_bytes(np.asarray(pages), inputs.kv_pages)
    check(case, oracle(case, inputs), np.asarray(out), np.asarray(lse), implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_operands_do_not_recompile(implementation: str) -> None:
    """Layer, scale, window, lengths and tables change; the program does not."""
    base = replace(MIXED, num_layers=2, pages_per_seq=4, num_pages=24)

    def function(*arrays: Array, row_offset: Array, scale: Array, sliding_window: Array) -> Any:
        return paged_attention(
            *arrays, row_offset=row_offset, scale=scale, sliding_window=sliding_window, num_kv_heads=2,
            max_query_len=8, return_lse=True, implementation=implementation,
        )  # fmt: skip

    jitted = jax.jit(chex.assert_max_traces(function, n=1))
    chex.clear_trace_counter()
    cases = [
        base,
        replace(base, layer=1, seed=base.seed + 1),
        replace(base, sliding_window=3, sharpness=0.5),
        replace(base, query_lens=(8, 0, 1, 2), seq_lens=(16, 5, 1, 13)),
        replace(base, query_lens=(1, 1, 1), seq_lens=(0, 2, 5), padding_seqs=2, padding_rows=10),
    ]
    for case in cases:
        inputs = build(case)
        out, lse = jitted(
            *operands(inputs),
            row_offset=jnp.int32(inputs.row_offset),
            scale=jnp.float32(case.scale),
            sliding_window=jnp.int32(case.sliding_window),
        )
        check(case, oracle(case, inputs), np.asarray(out), np.asarray(lse), implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_optional_arguments_and_no_jit(implementation: str) -> None:
    """Python scalars and no jit: None is no window, an int is that window, and only return_lse adds the lse."""
    case = Case(query_lens=(1, 0, 1), seq_lens=(9, 4, 6), padding_rows=1)
    inputs = build(case)

    def call(**changes: Any) -> Any:
        return paged_attention(
            *operands(inputs), row_offset=0, num_kv_heads=2, scale=case.scale, max_query_len=1,
            implementation=implementation, **changes,
        )  # fmt: skip

    for window, given_window in ((NO_WINDOW, None), (3, 3)):
        windowed = replace(case, sliding_window=window)
        out, lse = map(np.asarray, call(return_lse=True, sliding_window=given_window))
        check(windowed, oracle(windowed, inputs), out, lse, implementation)
    alone = call()
    assert isinstance(alone, Array)
    assert same_bytes(np.asarray(alone), np.asarray(call(return_lse=True)[0]))


def test_default_implementation_is_one_of_the_contract() -> None:
    assert default_implementation() in CONTRACT
    inputs = build(MIXED)
    out = paged_attention(*operands(inputs), row_offset=0, num_kv_heads=2, scale=MIXED.scale, max_query_len=8)
    _, lse = attend(MIXED, inputs, default_implementation())
    check(MIXED, oracle(MIXED, inputs), np.asarray(out), lse, "default")


@pytest.mark.parametrize("implementation", CONTRACT)
@pytest.mark.parametrize(("query_dtype", "pool_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_pool_of_another_dtype(query_dtype: str, pool_dtype: str, implementation: str) -> None:
    """The output has q's dtype, and nothing is rounded to the pool's or to q's on the way."""
    inputs = build(replace(MIXED, dtype=pool_dtype))
    inputs = inputs._replace(q=inputs.q.astype(jnp.dtype(query_dtype)))
    out, lse = attend(MIXED, inputs, implementation)
    case = replace(MIXED, dtype=query_dtype)
    check(case, oracle(case, inputs), out, lse, f"{implementation}, pool {pool_dtype}")


@pytest.mark.parametrize("implementation", CONTRACT)
def test_much_wider_table(implementation: str) -> None:
    case = replace(MIXED, pages_per_seq=300, num_pages=16)
    inputs = build(case)
    check(case, oracle(case, inputs), *attend(case, inputs, implementation), implementation)


def slots(case: Case, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    position = np.arange(length)
    return table[position // case.page_size], position % case.page_size


def merge_property(implementation: str, soft_cap: float | None) -> Callable[[int, int, int], None]:
    def check_merge(length: int, first: int, seed: int) -> None:
        first = min(first, length)
        case = Case(
            query_lens=(1, 1, 1), seq_lens=(length, first, length - first), logit_soft_cap=soft_cap, pages_per_seq=10,
            num_pages=34, max_query_len=1, seed=seed,
        )  # fmt: skip
        inputs = build(case)
        # The two halves hold the whole's keys and values in pages of their own; all three ask the same.
        whole = inputs.kv_pages[slots(case, inputs.block_tables[0], length)]
        inputs.kv_pages[slots(case, inputs.block_tables[1], first)] = whole[:first]
        inputs.kv_pages[slots(case, inputs.block_tables[2], length - first)] = whole[first:]
        inputs.q[:] = inputs.q[0]
        out, lse = (x.astype(np.float64) for x in attend(case, inputs, implementation))
        merged_lse = np.logaddexp(lse[1], lse[2])
        weights = np.exp(lse[1:] - merged_lse)[..., None]
        bound = 3 * ACCUMULATION
        np.testing.assert_allclose(merged_lse, lse[0], rtol=bound, atol=bound)
        largest_value = np.abs(inputs.values[0]).max()
        np.testing.assert_allclose((weights * out[1:]).sum(axis=0), out[0], rtol=0, atol=bound * largest_value)

    return check_merge


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("implementation", CONTRACT)
def test_halves_merge_by_lse_to_the_whole(implementation: str, soft_cap: float | None) -> None:
    """Attention over keys = the lse-weighted mean of attention over their parts, an empty part included."""
    property_ = merge_property(implementation, soft_cap)
    strategy = given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
    settings(max_examples=12, deadline=None)(strategy(property_))()
