"""The portable implementation: plain XLA operations, on every backend; what a CPU runs.

Work follows the real lengths, not the table's width. Decode walks a flat list of (sequence, group of pages) items in
chunks, so that a batch of mixed lengths costs the sum of its pages. Prefill walks tiles of queries, each over the pages
that it can see. Before both, full pages that all sequences of a step begin with are read once for all of them
(Hydragen: Juravsky et al. 2024, section 3). All keep an online softmax, so nothing of size queries x keys exists.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.ragged import owner

_FLOOR = -1e30  # below every logit and finite, so that exp(-inf - peak) is 0 and never NaN
_DECODE_KEYS = 32  # keys of one decode work item
_DECODE_ITEMS = (8, 32)  # decode work items computed at once: as many as tokens, within these bounds
_PREFILL_QUERIES = 64  # queries of one prefill tile
_DENSE_KEYS = 256  # keys that many queries look at in one step

_einsum = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)

type _Softmax = tuple[Array, Array, Array]
"""An online softmax: weighted values [..., head_dim], greatest logit and sum of weights [...]."""


@partial(jax.jit, static_argnames=("num_kv_heads", "max_query_len", "logit_soft_cap"))
def paged_attention(
    q: Array,
    kv_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    cu_query_lens: Array,
    row_offset: Array,
    scale: Array,
    window: Array,
    kv_scales: Array | None,
    *,
    num_kv_heads: int,
    max_query_len: int,
    logit_soft_cap: float | None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.api.paged_attention`; returns (out, lse). Jitted so that the layers share one trace."""
    num_tokens, num_heads, head_dim = q.shape
    pool = _Pool(kv_pages, kv_scales, block_tables, row_offset, num_kv_heads, head_dim)
    grouped = (q.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    query_lens = cu_query_lens[1:] - cu_query_lens[:-1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = owner(cu_query_lens[1:], token)
    # Token t attends to the first length[t] positions of its sequence.
    length = seq_lens[seq] - (cu_query_lens[seq + 1] - 1 - token)
    length = jnp.where((token < cu_query_lens[-1]) & (seq_lens[seq] > 0), length, 0)
    shared, begun = jnp.int32(0), _start(grouped.shape)
    if num_tokens > 1 and block_tables.shape[0] > 1:
        shared = _shared_pages(pool, query_lens, seq_lens)
        begun = _attend_shared(grouped, pool, seq, length, window, logit_soft_cap, shared)
    decode_length = jnp.where(query_lens[seq] == 1, length, 0)
    out, lse = _decode(grouped, pool, seq, decode_length, window, logit_soft_cap, shared, begun)
    if max_query_len > 1:
        prefill_lens = jnp.where((query_lens > 1) & (seq_lens > 0), query_lens, 0)
        tile = min(_PREFILL_QUERIES, 1 << (max_query_len - 1).bit_length())
        out, lse = _prefill(
            out, lse, grouped, pool, cu_query_lens, prefill_lens, seq_lens, window, logit_soft_cap, shared, begun, tile
        )
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(num_tokens, num_heads)


class _Pool(NamedTuple):
    kv_pages: Array
    kv_scales: Array | None
    block_tables: Array
    row_offset: Array
    num_kv_heads: int
    head_dim: int

    @property
    def page_size(self) -> int:
        return self.kv_pages.shape[1]

    @property
    def pages_per_seq(self) -> int:
        return self.block_tables.shape[1]

    def pages_for(self, keys: int) -> int:
        """Pages to look at in one step that should hold about so many keys."""
        return min(max(1, keys // self.page_size), self.pages_per_seq)

    def first_page(self, length: Array, window: Array, shared: Array) -> Array:
        """The first page, not of the first `shared`, with some of the last `window` of `length` keys."""
        return jnp.maximum(jnp.maximum(length - window, 0) // self.page_size, shared)

    def read(self, seq: Array, first_page: Array, count: int, length: Array) -> tuple[Array, Array, Array]:
        """Keys and values of `count` logical pages from `first_page` on, for every entry of `seq`.

        Returns (k, v, position): k and v float32 [*seq, count * page_size, num_kv_heads, head_dim], v zero and k
        anything from position `length` on; position int32 [*seq, count * page_size].
        """
        page = first_page[..., None] + jnp.arange(count, dtype=jnp.int32)
        page_id = self.block_tables[seq[..., None], jnp.minimum(page, self.pages_per_seq - 1)]
        row = jnp.where(page * self.page_size < length[..., None], page_id, 0) + self.row_offset
        position = page[..., None] * self.page_size + jnp.arange(self.page_size, dtype=jnp.int32)
        position = position.reshape(*seq.shape, count * self.page_size)
        # Whole pages: of the ways to gather, the one that reads memory in the longest pieces.
        kv = self.kv_pages.at[row].get(mode="clip")
        kv = kv.reshape(*seq.shape, count * self.page_size, self.num_kv_heads, 2, self.head_dim).astype(jnp.float32)
        if self.kv_scales is not None:
            scales = jnp.moveaxis(self.kv_scales.at[row].get(mode="clip"), -1, -2)
            kv *= scales.reshape(*kv.shape[:-1], 1)
        return kv[..., 0, :], jnp.where((position < length[..., None])[..., None, None], kv[..., 1, :], 0.0), position


def _decode(
    q: Array,
    pool: _Pool,
    seq: Array,
    length: Array,
    window: Array,
    soft_cap: float | None,
    shared: Array,
    begun: _Softmax,
) -> tuple[Array, Array]:
    """Queries at the end of their sequences: q[num_tokens, num_kv_heads, group, head_dim].

    Token t attends to the first `length[t]` positions of sequence `seq[t]`, of which `begun` has seen the first
    `shared` pages; length 0 gives zeros or what `begun` has.
    """
    num_tokens = q.shape[0]
    pages_per_item = pool.pages_for(_DECODE_KEYS)
    fewest, most = _DECODE_ITEMS
    chunk = min(max(fewest, num_tokens), most, num_tokens * _ceil_div(pool.pages_per_seq, pages_per_item))
    first_page = pool.first_page(length, window, shared)
    items = _ceil_div(jnp.maximum(_ceil_div(length, pool.page_size) - first_page, 0), pages_per_item)
    ends = jnp.cumsum(items, dtype=jnp.int32)
    # Item i of token t covers pages from i * pages_per_item + base on.
    base = first_page - (ends - items) * pages_per_item
    described = jnp.stack([seq, length, base], axis=-1)

    def step(i: Array, carry: _Softmax) -> _Softmax:
        acc, peak, total = carry
        item = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        token = owner(ends, item)
        item_seq, item_length, item_base = jnp.moveaxis(described[token], -1, 0)
        item_length = jnp.where(item < ends[-1], item_length, 0)
        k, v, position = pool.read(item_seq, item * pages_per_item + item_base, pages_per_item, item_length)
        visible = (position < item_length[:, None]) & (position >= item_length[:, None] - window)
        logits = _soften(_einsum("wkgd,wskd->wkgs", q[token], k), soft_cap)
        logits = jnp.where(visible[:, None, None, :], logits, -jnp.inf)
        new_peak = peak.at[token].max(logits.max(axis=-1))
        weights = jnp.exp(logits - new_peak[token][..., None])
        decay = jnp.exp(peak - new_peak)
        total = (total * decay).at[token].add(weights.sum(axis=-1))
        acc = (acc * decay[..., None]).at[token].add(_einsum("wkgs,wskd->wkgd", weights, v))
        return acc, new_peak, total

    return _finish(*lax.fori_loop(0, _ceil_div(ends[-1], chunk), step, begun))


def _shared_pages(pool: _Pool, query_lens: Array, seq_lens: Array) -> Array:
    """How many full pages, all before their queries, the sequences with queries begin with in common; 0 if fewer than
    two have any."""
    active = (query_lens > 0) & (seq_lens > 0)
    equal = (pool.block_tables == pool.block_tables[jnp.argmax(active)]) | ~active[:, None]
    num_equal = jnp.cumprod(equal.all(axis=0).astype(jnp.int32), dtype=jnp.int32).sum(dtype=jnp.int32)
    shortest = jnp.where(active, seq_lens - query_lens, pool.pages_per_seq * pool.page_size).min()
    return jnp.where(active.sum() > 1, jnp.minimum(num_equal, shortest // pool.page_size), 0)


def _attend_shared(
    q: Array, pool: _Pool, seq: Array, length: Array, window: Array, soft_cap: float | None, shared: Array
) -> _Softmax:
    """The first `shared` pages, which the sequences of all tokens with length > 0 begin with in common."""
    num_tokens, num_kv_heads, group, head_dim = q.shape
    pages_per_step = pool.pages_for(_DENSE_KEYS)
    end = shared * pool.page_size
    first_key = jnp.where(length > 0, jnp.maximum(length - window, 0), end)[:, None]
    first = first_key.min() // pool.page_size
    reader = seq[jnp.argmax(length > 0)]  # any of them

    def step(i: Array, carry: _Softmax) -> _Softmax:
        k, v, key = pool.read(reader, first + i * pages_per_step, pages_per_step, end)
        return _attend(carry, q, k, v, (key < end) & (key >= first_key), soft_cap)

    start = _start((num_kv_heads, group, num_tokens, head_dim))
    acc, peak, total = lax.fori_loop(0, _ceil_div(shared - first, pages_per_step), step, start)
    return jnp.moveaxis(acc, 2, 0), jnp.moveaxis(peak, 2, 0), jnp.moveaxis(total, 2, 0)


def _prefill(
    out: Array,
    lse: Array,
    q: Array,
    pool: _Pool,
    cu_query_lens: Array,
    query_lens: Array,
    seq_lens: Array,
    window: Array,
    soft_cap: float | None,
    shared: Array,
    begun: _Softmax,
    tile: int,
) -> tuple[Array, Array]:
    """Fills the rows of the sequences with query_lens > 0 into out and lse; all others stay. Of their pages `begun` has
    seen the first `shared`."""
    num_tokens = q.shape[0]
    pages_per_step = pool.pages_for(_DENSE_KEYS)
    tiles = _ceil_div(query_lens, tile)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    first_tile = ends - tiles
    # The last tile may reach past the last token.
    q, out, lse, *first = (jnp.pad(x, [(0, tile)] + [(0, 0)] * (x.ndim - 1)) for x in (q, out, lse, *begun))

    def attend_tile(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        seq = owner(ends, t)
        skipped = (t - first_tile[seq]) * tile
        row = cu_query_lens[seq] + skipped
        position = seq_lens[seq] - query_lens[seq] + skipped + jnp.arange(tile, dtype=jnp.int32)
        length = jnp.minimum(seq_lens[seq], position[-1] + 1)  # keys that the tile's last query sees
        first_page = pool.first_page(position[0] + 1, window, shared)
        queries = lax.dynamic_slice_in_dim(q, row, tile)

        def step(i: Array, carry: _Softmax) -> _Softmax:
            k, v, key = pool.read(seq, first_page + i * pages_per_step, pages_per_step, length)
            visible = (key < length) & (key <= position[:, None]) & (key > position[:, None] - window)
            return _attend(carry, queries, k, v, visible, soft_cap)

        acc, peak, total = (jnp.moveaxis(lax.dynamic_slice_in_dim(x, row, tile), 0, 2) for x in first)
        steps = _ceil_div(_ceil_div(length, pool.page_size) - first_page, pages_per_step)
        tile_out, tile_lse = _finish(*lax.fori_loop(0, steps, step, (acc, peak, total)))
        is_query = (skipped + jnp.arange(tile, dtype=jnp.int32) < query_lens[seq])[:, None, None]
        tile_out = jnp.where(
            is_query[..., None], jnp.moveaxis(tile_out, 2, 0), lax.dynamic_slice_in_dim(out, row, tile)
        )
        tile_lse = jnp.where(is_query, jnp.moveaxis(tile_lse, 2, 0), lax.dynamic_slice_in_dim(lse, row, tile))
        return (
            lax.dynamic_update_slice_in_dim(out, tile_out, row, 0),
            lax.dynamic_update_slice_in_dim(lse, tile_lse, row, 0),
        )

    out, lse = lax.fori_loop(0, ends[-1], attend_tile, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _start(shape: tuple[int, ...]) -> _Softmax:
    """One that has seen nothing."""
    return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], _FLOOR), jnp.zeros(shape[:-1], jnp.float32)


def _attend(carry: _Softmax, q: Array, k: Array, v: Array, visible: Array, soft_cap: float | None) -> _Softmax:
    """The online softmax `carry` of [num_kv_heads, group, queries, head_dim] with one more block of keys and values.

    q[queries, num_kv_heads, group, head_dim]; k, v [keys, num_kv_heads, head_dim]; visible [queries, keys].
    """
    acc, peak, total = carry
    logits = _soften(_einsum("qkgd,skd->kgqs", q, k), soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    new_peak = jnp.maximum(peak, logits.max(axis=-1))
    weights = jnp.exp(logits - new_peak[..., None])
    decay = jnp.exp(peak - new_peak)
    total = total * decay + weights.sum(axis=-1)
    acc = acc * decay[..., None] + _einsum("kgqs,skd->kgqd", weights, v)
    return acc, new_peak, total


def _finish(acc: Array, peak: Array, total: Array) -> tuple[Array, Array]:
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    return out, jnp.where(total > 0, peak + jnp.log(total), -jnp.inf)


def _soften(logits: Array, soft_cap: float | None) -> Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _ceil_div[T: (int, Array)](a: T, b: int) -> T:
    return -(-a // b)
