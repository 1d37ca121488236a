"""The allocator: a stack of free pages and a reference count for each page.

A page is free when nothing refers to it. Tables (and whoever else names a page) each hold one reference, so sharing a
page is `retain` and giving it back is `release`. All functions are pure, work inside jit, scan and while_loop, and
may be vmapped over a batch of pools.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Int32

from paged_jax.layout import NULL_PAGE


class PagePool(NamedTuple):
    """Which pages are free, and how many references each page has.

    Attributes:
      free_stack: int32 [num_pages]; its first `num_free` entries are the free page ids, the top one last. What lies
        above is meaningless.
      num_free: int32 [].
      ref_counts: int32 [num_pages]; 0 for free pages and for the null page.
    """

    free_stack: Array
    num_free: Array
    ref_counts: Array

    @property
    def num_pages(self) -> int:
        """Pages, the null page included."""
        return self.ref_counts.shape[-1]


def create(num_pages: int) -> PagePool:
    """A pool with all pages free but the null page; page 1 is allocated first.

    Raises:
      ValueError: num_pages is below 2.
    """
    if num_pages < 2:
        raise ValueError(f"num_pages must be at least 2 (page {NULL_PAGE} is the null page), got {num_pages}")
    return PagePool(
        free_stack=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_pages - 1),
        ref_counts=jnp.zeros(num_pages, jnp.int32),
    )


def allocate(
    pool: PagePool, count: Int[Array, ""] | int, *, limit: int
) -> tuple[PagePool, Int32[Array, " limit"], Bool[Array, ""]]:
    """Takes `count` free pages, each with one reference: all or nothing.

    Args:
      pool: the pool.
      count: pages wanted; may be traced (a Python int that jit traces is int64 in x64 mode).
      limit: static upper bound of `count`.

    Returns:
      (pool, page_ids, ok). Entries of `page_ids` from `count` on are the null page. When `ok` is false (fewer than
      `count` free, or `count` outside 0..limit) the pool is unchanged and all entries are the null page.
    """
    count = jnp.asarray(count, jnp.int32)
    ok = (count >= 0) & (count <= pool.num_free) & (count <= limit)
    taken = jnp.where(ok, count, 0)
    index = jnp.arange(limit, dtype=jnp.int32)
    top = pool.free_stack[jnp.maximum(pool.num_free - 1 - index, 0)]
    page_ids = jnp.where(index < taken, top, NULL_PAGE)
    ref_counts = pool.ref_counts.at[_or_drop(pool, page_ids)].set(1, mode="drop")
    return pool._replace(num_free=pool.num_free - taken, ref_counts=ref_counts), page_ids, ok


def retain(pool: PagePool, page_ids: Int32[Array, "*n"]) -> PagePool:
    """Adds one reference for every entry of `page_ids`; ids may repeat, null pages are passed over.

    The pages must be live: a free page cannot be retained.
    """
    return pool._replace(ref_counts=pool.ref_counts.at[_or_drop(pool, page_ids)].add(1, mode="drop"))


def release(pool: PagePool, page_ids: Int32[Array, "*n"]) -> PagePool:
    """Takes one reference away for every entry of `page_ids`; ids may repeat, null pages are passed over.

    Pages left without a reference become free, the lowest id on top of the stack. A page that is free already stays
    so. Costs the number of ids, not the pool's size.
    """
    # Sorted, so that equal ids are neighbours; null pages come last, past the pool's end.
    index = jnp.sort(_or_drop(pool, page_ids.reshape(-1)))
    remaining = pool.ref_counts.at[index].add(-1, mode="drop")
    was_held = pool.ref_counts.at[index].get(mode="fill", fill_value=0) > 0
    is_free = remaining.at[index].get(mode="fill", fill_value=0) <= 0
    freed = (jnp.diff(index, prepend=jnp.int32(NULL_PAGE)) > 0) & was_held & is_free
    num_freed = freed.sum(dtype=jnp.int32)
    position = pool.num_free + num_freed - jnp.cumsum(freed, dtype=jnp.int32)
    return PagePool(
        free_stack=pool.free_stack.at[jnp.where(freed, position, pool.num_pages)].set(index, mode="drop"),
        num_free=pool.num_free + num_freed,
        ref_counts=remaining.at[index].max(0, mode="drop"),
    )


def unshare(pool: PagePool, page_ids: Int32[Array, "*n"]) -> PagePool:
    """As `release`, for pages that keep another reference: nothing becomes free, so the stack is left alone."""
    return pool._replace(ref_counts=pool.ref_counts.at[_or_drop(pool, page_ids)].add(-1, mode="drop"))


def _or_drop(pool: PagePool, page_ids: Array) -> Array:
    """Page ids as scatter indices: the null page becomes an index that mode="drop" drops."""
    return jnp.where(page_ids == NULL_PAGE, pool.num_pages, page_ids)
