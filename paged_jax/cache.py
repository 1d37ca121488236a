"""The paged cache: pages, their pool and the block tables as one immutable value, moved by pure functions.

Every function takes a cache and returns a new one. Called inside jit with the cache as a loop carry or a donated
argument, the pages are updated in place: metadata is decided first, then the pages are copied and written, and
nothing ever selects between two versions of them.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from paged_jax import block_tables, page_pool
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables, PageCopies
from paged_jax.layout import KVLayout
from paged_jax.page_pool import PagePool


@no_type_check  # jax also builds instances of shapes, host arrays and placeholders
@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class KVPages:
    """Keys and values of all layers: what a model's layers write and read.

    Attributes:
      pages: [num_layers * num_pages, page_size, num_kv_heads * 2 * padded_head_dim].
      layout: static geometry.
      scales: of quantised pages, float32 [num_layers * num_pages, num_kv_heads * 2, page_size]; None otherwise.
    """

    pages: Array
    layout: KVLayout = field(metadata={"static": True})
    scales: Array | None = None

    @property
    def num_kv_heads(self) -> int:
        """KV heads in these pages: the layout's, or inside `jax.shard_map` those of one device."""
        return self.pages.shape[-1] // (2 * self.layout.padded_head_dim)

    @classmethod
    def create(cls, layout: KVLayout) -> "KVPages":
        """Zeroed pages on the default device."""
        scales = jnp.zeros(layout.scales_shape, jnp.float32) if layout.is_quantised else None
        return cls(jnp.zeros(layout.pages_shape, layout.dtype), layout, scales)


@no_type_check  # jax also builds instances of shapes, host arrays and placeholders
@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class PagedCache:
    """Everything that is cached for `max_seqs` sequences of one model.

    Attributes:
      kv: the pages.
      pool: which pages are free, and how often each is referred to.
      tables: the pages of each sequence.
    """

    kv: KVPages
    pool: PagePool
    tables: BlockTables

    @classmethod
    def create(cls, layout: KVLayout, *, max_seqs: int, pages_per_seq: int) -> "PagedCache":
        """An empty cache with room for `max_seqs` sequences of up to `pages_per_seq` pages each.

        Raises:
          ValueError: a size is below 1.
        """
        return cls(
            kv=KVPages.create(layout),
            pool=page_pool.create(layout.num_pages),
            tables=block_tables.create(max_seqs, pages_per_seq),
        )

    @property
    def layout(self) -> KVLayout:
        """The static geometry."""
        return self.kv.layout


def append(
    cache: PagedCache, counts: Int32[Array, " max_seqs"], *, num_tokens: int
) -> tuple[PagedCache, Batch, Bool[Array, ""]]:
    """Makes room for `counts[s]` more tokens of each sequence; see `block_tables.append`.

    Returns:
      (cache, batch, ok); when `ok` is false the tables and the pool are unchanged and the batch writes nothing.
    """
    return _grown(
        cache,
        block_tables.append(cache.tables, cache.pool, counts, page_size=cache.layout.page_size, num_tokens=num_tokens),
    )


def append_decode(cache: PagedCache, active: Bool[Array, " max_seqs"]) -> tuple[PagedCache, Batch, Bool[Array, ""]]:
    """Makes room for one more token of each active sequence; token i of the batch is row i.

    Returns:
      (cache, batch, ok); when `ok` is false the tables and the pool are unchanged and the batch writes nothing.
    """
    return _grown(cache, block_tables.append_decode(cache.tables, cache.pool, active, page_size=cache.layout.page_size))


def fork(cache: PagedCache, src: Int32[Array, " n"], dst: Int32[Array, " n"]) -> PagedCache:
    """Row `dst[i]` becomes a second name for row `src[i]`'s tokens; see `block_tables.fork`."""
    tables, pool = block_tables.fork(cache.tables, cache.pool, src, dst)
    return replace(cache, tables=tables, pool=pool)


def reorder(cache: PagedCache, parents: Int32[Array, " max_seqs"]) -> PagedCache:
    """Row i becomes what row `parents[i]` was, all at once; parents may repeat; see `block_tables.reorder`."""
    tables, pool = block_tables.reorder(cache.tables, cache.pool, parents)
    return replace(cache, tables=tables, pool=pool)


def truncate(cache: PagedCache, lens: Int32[Array, " max_seqs"]) -> PagedCache:
    """Cuts every sequence to at most `lens[s]` tokens and gives back the pages behind."""
    tables, pool = block_tables.truncate(cache.tables, cache.pool, lens, page_size=cache.layout.page_size)
    return replace(cache, tables=tables, pool=pool)


def release(cache: PagedCache, mask: Bool[Array, " max_seqs"]) -> PagedCache:
    """Empties the rows of `mask` and gives back their pages."""
    tables, pool = block_tables.release(cache.tables, cache.pool, mask)
    return replace(cache, tables=tables, pool=pool)


@partial(jax.jit, inline=True)  # so that outside jit it compiles once, and not a loop anew each call
def copy_pages(kv: KVPages, copies: PageCopies) -> KVPages:
    """Copies whole pages, all layers of each and their scales, as copy-on-write asks for. Costs the real number of
    copies."""

    def copy(i: Array, kv: KVPages) -> KVPages:
        src, dst = kv.layout.rows_of_page(copies.src[i]), kv.layout.rows_of_page(copies.dst[i])
        return jax.tree.map(lambda rows: rows.at[dst].set(rows[src], unique_indices=True), kv)

    return lax.fori_loop(0, copies.count, copy, kv)


def gather_kv(
    cache: PagedCache, *, layer: int
) -> tuple[Float[Array, "max_seqs max_len h d"], Float[Array, "max_seqs max_len h d"]]:
    """Keys and values of one layer as contiguous arrays, zeros past each sequence's end: to look at, or to test.

    Returns:
      (k, v), each [max_seqs, pages_per_seq * page_size, num_kv_heads, head_dim] in the pool's dtype, or the numbers
      that a quantised pool stands for, in float32.
    """
    layout, tables = cache.layout, cache.tables
    rows = tables.page_ids + layout.row_offset(layer)
    k, v = layout.split_kv(cache.kv.pages[rows])
    if cache.kv.scales is not None:
        k_scale, v_scale = layout.split_scales(cache.kv.scales[rows])
        k, v = k.astype(jnp.float32) * k_scale[..., None], v.astype(jnp.float32) * v_scale[..., None]
    max_seqs, pages_per_seq = rows.shape
    max_len = pages_per_seq * layout.page_size
    is_token = jnp.arange(max_len, dtype=jnp.int32) < tables.seq_lens[:, None]

    def contiguous(x: Array) -> Array:
        return jnp.where(is_token[..., None, None], x.reshape(max_seqs, max_len, *x.shape[-2:]), 0)

    return contiguous(k), contiguous(v)


def usage(cache: PagedCache) -> dict[str, Int32[Array, ""]]:
    """Pages in use and slots wasted: `live` pages, `free` pages, `tokens` held (a shared page's once for each row
    that names it), and `internal_waste`, the slots of live pages that no token uses, each page counted once."""
    layout, tables = cache.layout, cache.tables
    column = jnp.arange(tables.page_ids.shape[1], dtype=jnp.int32)
    used = jnp.clip(tables.seq_lens[:, None] - column * layout.page_size, 0, layout.page_size)
    filled = jnp.zeros(layout.num_pages, jnp.int32).at[tables.page_ids].max(used)
    live = jnp.int32(layout.num_pages - 1) - cache.pool.num_free
    return {
        "live": live,
        "free": cache.pool.num_free,
        "tokens": tables.seq_lens.sum(dtype=jnp.int32),
        "internal_waste": live * layout.page_size - filled[1:].sum(dtype=jnp.int32),
    }


def _grown(cache: PagedCache, grown: block_tables.Grown) -> tuple[PagedCache, Batch, Bool[Array, ""]]:
    tables, pool, batch, copies, ok = grown
    return PagedCache(copy_pages(cache.kv, copies), pool, tables), batch, ok
