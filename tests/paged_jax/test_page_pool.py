"""The allocator: limits, repeated ids, the null page, vmap."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from paged_jax import PagePool, page_pool
from tests.paged_jax.model_cache import check_all_free, i32, on_host, shuffled_pool

allocate = on_host(page_pool.allocate, ["limit"])  # the count is traced: a Python int is int64 in x64 mode
retain = on_host(page_pool.retain)
release = on_host(page_pool.release)
unshare = on_host(page_pool.unshare)


def free_pages(pool: PagePool) -> list[int]:
    return np.asarray(pool.free_stack)[: int(pool.num_free)].tolist()


def assert_same(a: PagePool, b: PagePool) -> None:
    """Equal in everything that has a meaning."""
    assert free_pages(a) == free_pages(b)
    assert a.ref_counts.tolist() == b.ref_counts.tolist()


def test_create() -> None:
    pool = page_pool.create(5)
    check_all_free(pool)
    assert pool.num_pages == 5
    assert allocate(pool, 2, limit=4)[1].tolist() == [1, 2, 0, 0]
    with pytest.raises(ValueError, match=r"num_pages must be at least 2 \(page 0 is the null page\), got 1"):
        page_pool.create(1)


@pytest.mark.parametrize(("count", "in_jit"), [(0, True), (1, True), (5, True), (7, True), (5, False)])
def test_allocate_takes_from_the_top(count: int, in_jit: bool) -> None:
    pool = shuffled_pool(8, seed=1)
    new, page_ids, ok = jax.device_get((allocate if in_jit else page_pool.allocate)(pool, count, limit=7))
    assert ok
    assert page_ids.tolist() == free_pages(pool)[::-1][:count] + [0] * (7 - count)
    assert free_pages(new) == free_pages(pool)[: 7 - count]
    assert new.ref_counts.tolist() == [int(page in page_ids[:count].tolist()) for page in range(8)]


@pytest.mark.parametrize(
    ("count", "limit"), [(8, 10), (5, 4), (-1, 4), (2**31 - 1, 4), (-(2**31), 4), (1, 0)],
    ids=["more than free", "above the limit", "negative", "largest", "smallest", "limit 0"],
)  # fmt: skip
def test_allocate_is_all_or_nothing(count: int, limit: int) -> None:
    pool = shuffled_pool(8, seed=2)
    new, page_ids, ok = allocate(pool, count, limit=limit)
    assert not ok
    assert page_ids.tolist() == [0] * limit
    assert_same(new, pool)


def test_an_empty_pool_gives_nothing_but_takes_back() -> None:
    pool, page_ids, ok = allocate(shuffled_pool(4, seed=0), 3, limit=3)
    assert ok
    assert int(pool.num_free) == 0
    assert not allocate(pool, 1, limit=3)[2]
    assert allocate(pool, 0, limit=3)[2]
    check_all_free(release(pool, page_ids))


def test_repeated_ids_count_each_time() -> None:
    pool, _, _ = allocate(page_pool.create(6), 3, limit=3)
    pool = retain(pool, i32(2, 0, 2, 3, 0))
    assert pool.ref_counts.tolist() == [0, 1, 3, 2, 0, 0]
    pool = release(pool, i32(2, 2, 0, 3, 1))
    assert pool.ref_counts.tolist() == [0, 0, 1, 1, 0, 0]
    assert free_pages(pool) == [5, 4, 1]


def test_a_page_released_by_all_its_holders_at_once_is_freed_once() -> None:
    pool, _, _ = allocate(page_pool.create(6), 3, limit=3)
    pool = release(retain(pool, i32(2, 2)), i32(2, 2, 2))
    assert free_pages(pool) == [5, 4, 2]


def test_pages_freed_together_are_taken_again_lowest_first() -> None:
    pool, _, _ = allocate(page_pool.create(8), 6, limit=6)
    pool = release(pool, i32(5, 2, 4))
    assert free_pages(pool) == [7, 5, 4, 2]
    assert allocate(pool, 3, limit=3)[1].tolist() == [2, 4, 5]


def test_a_page_released_twice_is_free_once() -> None:
    pool, _, _ = allocate(page_pool.create(4), 2, limit=2)
    once = release(pool, i32(1))
    assert_same(release(once, i32(1)), once)
    assert_same(release(pool, i32(1, 1, 1)), once)


@pytest.mark.parametrize("change", [retain, release, unshare])
def test_null_pages_are_passed_over(change: Callable[..., PagePool]) -> None:
    pool, _, _ = allocate(shuffled_pool(5, seed=3), 2, limit=2)
    assert_same(change(pool, i32(0, 0, 0)), pool)
    assert_same(change(pool, jnp.zeros((2, 3), jnp.int32)), pool)


def test_unshare_frees_nothing() -> None:
    pool, _, _ = allocate(page_pool.create(4), 2, limit=2)
    pool = retain(pool, i32(1, 1, 2))
    assert_same(unshare(pool, i32(1, 0, 1, 2)), release(pool, i32(1, 0, 1, 2)))


def test_metadata_stays_int32_in_loops() -> None:
    """Carries of a while_loop must keep their dtype, also where x64 makes sums and aranges int64."""

    def body(pool: PagePool) -> PagePool:
        pool, page_ids, _ = page_pool.allocate(pool, 2, limit=3)
        return page_pool.release(page_pool.retain(pool, page_ids), page_ids[:1])

    pool = lax.while_loop(lambda pool: pool.num_free > 1, body, shuffled_pool(9, seed=4))
    assert {leaf.dtype for leaf in pool} == {jnp.dtype(jnp.int32)}
    assert int(pool.num_free) == 0


def test_vmap_equals_a_loop() -> None:
    pools = [shuffled_pool(8, seed) for seed in range(4)]
    counts = i32(0, 3, 7, 8)  # the last does not fit
    again = jnp.array([[0, 0, 0], [1, 1, 0], [2, 5, 2], [4, 4, 4]], jnp.int32)

    def steps(ops: Any, pool: PagePool, count: Array, page_ids: Array) -> tuple[PagePool, Array, Array]:
        allocate, retain, release = ops
        pool, taken, ok = allocate(pool, count, limit=7)
        pool = retain(pool, jnp.where(ok, taken, 0))
        return release(pool, jnp.where(pool.ref_counts[page_ids] > 0, page_ids, 0)), taken, ok

    batched = on_host(jax.vmap(partial(steps, (page_pool.allocate, page_pool.retain, page_pool.release))))
    stacked = batched(jax.tree.map(lambda *leaves: jnp.stack(leaves), *pools), counts, again)
    for i, pool in enumerate(pools):
        expected = steps((allocate, retain, release), pool, counts[i], np.array(again[i]))
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), expected)
    assert stacked[2].tolist() == [True, True, True, False]
