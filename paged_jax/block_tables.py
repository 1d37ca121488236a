"""Block tables: which pages, in which order, hold each sequence; grow, share, reorder and shrink them.

These are metadata functions: they move page ids and counts, and return a `Batch` and the list of page copies that
copy-on-write asks for, but never touch the pages. They are pure, work inside jit, scan and while_loop, and may be
vmapped. `paged_jax.cache` composes them with the pages.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from paged_jax import batch, page_pool
from paged_jax.batch import Batch
from paged_jax.layout import NULL_PAGE, ceil_div
from paged_jax.page_pool import PagePool


class BlockTables(NamedTuple):
    """A sequence is a row.

    Attributes:
      page_ids: int32 [max_seqs, pages_per_seq]; the first ceil(seq_len / page_size) entries of a row are its pages
        in logical order, the others the null page.
      seq_lens: int32 [max_seqs], tokens of each sequence; 0 for an empty row.
    """

    page_ids: Array
    seq_lens: Array


class PageCopies(NamedTuple):
    """Pages to copy before the step writes.

    Attributes:
      src: int32 [max_seqs]; entries from `count` on are meaningless.
      dst: int32 [max_seqs].
      count: int32 [].
    """

    src: Array
    dst: Array
    count: Array  # type: ignore[assignment]  # takes the place of tuple.count


Grown = tuple[BlockTables, PagePool, Batch, PageCopies, Bool[Array, ""]]


def create(max_seqs: int, pages_per_seq: int) -> BlockTables:
    """Empty tables.

    Raises:
      ValueError: a size is below 1.
    """
    for name, value in (("max_seqs", max_seqs), ("pages_per_seq", pages_per_seq)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return BlockTables(
        page_ids=jnp.full((max_seqs, pages_per_seq), NULL_PAGE, jnp.int32), seq_lens=jnp.zeros(max_seqs, jnp.int32)
    )


def append(
    tables: BlockTables,
    pool: PagePool,
    counts: Int32[Array, " max_seqs"],
    *,
    page_size: int,
    num_tokens: int,
    max_query_len: int | None = None,
    rereads: Int32[Array, " max_seqs"] | None = None,
) -> Grown:
    """Makes room for `counts[s]` more tokens of each sequence, taking pages as they are needed.

    A last page that is partly filled and shared is copied before it is written (copy-on-write): all sequences that
    write it in this step get a copy, but the last one when nobody else refers to the page.

    Args:
      tables: the tables.
      pool: the pool that the tables' pages come from.
      counts: tokens to append, 0 for sequences that rest. A sequence whose length was 0 begins.
      page_size: tokens a page.
      num_tokens: static length of the packed batch, at least the sum of `counts` and `rereads`.
      max_query_len: static upper bound of `counts + rereads`; num_tokens if None.
      rereads: cached tokens at the end of each sequence to compute again, for their hidden states: in the batch they
        come before the new tokens, and nothing is written for them. None for none.

    Returns:
      (tables, pool, batch, copies, ok). `ok` is one bool for the whole step. When it is false (too few free pages, a
      sequence longer than its row, a negative count, a query above max_query_len, a sum above num_tokens, or a reread
      of what is not cached) tables and pool are unchanged, the batch writes nothing and there is nothing to copy.

    Raises:
      ValueError: num_tokens is below 1, or max_query_len outside 1..num_tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    longest = num_tokens if max_query_len is None else max_query_len
    if not 1 <= longest <= num_tokens:
        raise ValueError(f"max_query_len must be in 1..num_tokens = {num_tokens}, got {longest}")
    rereads = jnp.zeros_like(counts) if rereads is None else rereads
    query_lens = counts + rereads
    fits = (query_lens.sum(dtype=jnp.int32) <= num_tokens) & (query_lens <= longest).all()
    fits &= ((rereads >= 0) & (rereads <= tables.seq_lens)).all()
    rereads = jnp.where(fits, rereads, 0)
    new_pages_limit = num_tokens // page_size + counts.shape[0]
    build = partial(batch.ragged, rereads=rereads, num_tokens=num_tokens, max_query_len=longest)
    return _grow(tables, pool, counts, fits, build, page_size=page_size, new_pages_limit=new_pages_limit)


def append_decode(tables: BlockTables, pool: PagePool, active: Bool[Array, " max_seqs"], *, page_size: int) -> Grown:
    """Makes room for one more token of each active sequence; token i of the batch is row i.

    Returns:
      As `append`; rows that are not active get seq_len 0 and drop their slot.
    """
    counts = active.astype(jnp.int32)
    return _grow(
        tables, pool, counts, jnp.bool_(True), batch.decode, page_size=page_size, new_pages_limit=counts.shape[0]
    )


def reorder(tables: BlockTables, pool: PagePool, parents: Int32[Array, " max_seqs"]) -> tuple[BlockTables, PagePool]:
    """Row i becomes what row `parents[i]` was, all rows at once; parents may repeat.

    Nothing is copied: children share their parent's pages, the partly filled one included, until one of them
    writes. Pages that no row names any more become free.
    """
    moved = (parents != jnp.arange(parents.shape[0], dtype=jnp.int32))[:, None]
    new = BlockTables(tables.page_ids[parents], tables.seq_lens[parents])
    pool = page_pool.retain(pool, jnp.where(moved, new.page_ids, NULL_PAGE))
    pool = page_pool.release(pool, jnp.where(moved, tables.page_ids, NULL_PAGE))
    return new, pool


def fork(
    tables: BlockTables, pool: PagePool, src: Int32[Array, " n"], dst: Int32[Array, " n"]
) -> tuple[BlockTables, PagePool]:
    """Row `dst[i]` becomes a second name for row `src[i]`'s tokens, sharing all its pages.

    Args:
      tables: the tables.
      pool: their pool.
      src: rows to fork.
      dst: rows to fork into, all different; what they held is released. A negative entry skips its pair.
    """
    max_seqs = tables.seq_lens.shape[0]
    parents = jnp.arange(max_seqs, dtype=jnp.int32)
    parents = parents.at[jnp.where(dst < 0, max_seqs, dst)].set(src, mode="drop")
    return reorder(tables, pool, parents)


def adopt(
    tables: BlockTables,
    pool: PagePool,
    row: Int32[Array, ""],
    page_ids: Int32[Array, " pages_per_seq"],
    seq_len: Int32[Array, ""],
) -> tuple[BlockTables, PagePool]:
    """An empty row becomes a name for live pages, each with one reference more: a sequence begins with cached tokens.

    Args:
      tables: the tables.
      pool: their pool.
      row: an empty row.
      page_ids: pages that hold the sequence's first tokens, then null pages.
      seq_len: how many tokens they hold.
    """
    pool = page_pool.retain(pool, page_ids)
    return BlockTables(tables.page_ids.at[row].set(page_ids), tables.seq_lens.at[row].set(seq_len)), pool


def release_before(
    tables: BlockTables, pool: PagePool, first_pages: Int32[Array, " max_seqs"]
) -> tuple[BlockTables, PagePool]:
    """Gives back each row's pages before its logical page `first_pages[s]`, where no window reaches any more.

    The lengths stay, and with them the places of the other pages; the entries become null pages, which kernels do not
    read when every layer attends through a window that starts behind them.
    """
    column = jnp.arange(tables.page_ids.shape[1], dtype=jnp.int32)
    return _shrink(tables, pool, tables.seq_lens, column >= first_pages[:, None])


def truncate(
    tables: BlockTables, pool: PagePool, lens: Int32[Array, " max_seqs"], *, page_size: int
) -> tuple[BlockTables, PagePool]:
    """Cuts every sequence to at most `lens[s]` tokens (below 0 counts as 0) and gives back the pages behind."""
    seq_lens = jnp.clip(lens, 0, tables.seq_lens)
    column = jnp.arange(tables.page_ids.shape[1], dtype=jnp.int32)
    return _shrink(tables, pool, seq_lens, column < ceil_div(seq_lens, page_size)[:, None])


def release(tables: BlockTables, pool: PagePool, mask: Bool[Array, " max_seqs"]) -> tuple[BlockTables, PagePool]:
    """Empties the rows of `mask` and gives back their pages."""
    return _shrink(tables, pool, jnp.where(mask, 0, tables.seq_lens), ~mask[:, None])


def _shrink(tables: BlockTables, pool: PagePool, seq_lens: Array, kept: Array) -> tuple[BlockTables, PagePool]:
    pool = page_pool.release(pool, jnp.where(kept, NULL_PAGE, tables.page_ids))
    return BlockTables(jnp.where(kept, tables.page_ids, NULL_PAGE), seq_lens), pool


def _grow(
    tables: BlockTables,
    pool: PagePool,
    counts: Array,
    fits: Array,
    build_batch: Callable[..., Batch],
    *,
    page_size: int,
    new_pages_limit: int,
) -> Grown:
    max_seqs, pages_per_seq = tables.page_ids.shape
    row = jnp.arange(max_seqs, dtype=jnp.int32)
    cached_lens = tables.seq_lens
    owned = ceil_div(cached_lens, page_size)
    last_page = tables.page_ids[row, jnp.maximum(owned - 1, 0)]

    fits &= (counts >= 0).all() & (cached_lens + counts <= pages_per_seq * page_size).all()
    counts = jnp.where(fits, counts, 0)
    copied = _must_copy(pool, last_page, (counts > 0) & (cached_lens % page_size > 0))
    # A sequence takes first the copy of its last page, then the pages that are new.
    taken = copied.astype(jnp.int32) + ceil_div(cached_lens + counts, page_size) - owned
    ends = jnp.cumsum(taken, dtype=jnp.int32)
    pool, page_ids, enough = page_pool.allocate(pool, ends[-1], limit=min(new_pages_limit + max_seqs, pool.num_pages))
    ok = fits & enough
    counts, taken, copied = (jnp.where(ok, x, 0) for x in (counts, taken, copied.astype(jnp.int32)))

    first = owned - copied
    column = jnp.arange(pages_per_seq, dtype=jnp.int32)
    is_new = (column >= first[:, None]) & (column < (first + taken)[:, None])
    rank = (ends - taken - first)[:, None] + column
    new_page_ids = jnp.where(is_new, page_ids[jnp.clip(rank, 0, page_ids.shape[0] - 1)], tables.page_ids)
    copies = _compact(copied, last_page, new_page_ids[row, jnp.maximum(owned - 1, 0)])
    pool = page_pool.unshare(pool, jnp.where(copied > 0, last_page, NULL_PAGE))
    grown = build_batch(new_page_ids, cached_lens, counts, page_size=page_size)
    return BlockTables(new_page_ids, cached_lens + counts), pool, grown, copies, ok


def _must_copy(pool: PagePool, page: Array, writes: Array) -> Array:
    """Which of the rows that write into `page` this step must write into a copy of it."""
    row = jnp.arange(page.shape[0], dtype=jnp.int32)
    index = jnp.where(writes, page, pool.num_pages)
    writers = jnp.zeros(pool.num_pages, jnp.int32).at[index].add(1, mode="drop")
    last_writer = jnp.full(pool.num_pages, -1, jnp.int32).at[index].max(row, mode="drop")
    keeps = (writers[page] == pool.ref_counts[page]) & (last_writer[page] == row)
    return writes & ~keeps


def _compact(mask: Array, src: Array, dst: Array) -> PageCopies:
    """Moves the pairs of `mask` to the front."""
    position = jnp.where(mask > 0, jnp.cumsum(mask, dtype=jnp.int32) - 1, mask.shape[0])
    empty = jnp.zeros_like(src)
    return PageCopies(
        empty.at[position].set(src, mode="drop"),
        empty.at[position].set(dst, mode="drop"),
        mask.sum(dtype=jnp.int32),
    )
