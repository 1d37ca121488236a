"""The kernel: queries of a tile against the pages of their sequence, with the copies of later blocks in flight.

The grid walks the work items. An item loops over blocks of its sequence's keys; each page of a block is one copy that
brings all heads' keys and values from HBM into a ring in VMEM. A cursor in scalar memory runs `slots - 1` blocks ahead
of the computation, across items, so that only the first block of a launch is waited for from its start.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import target, work
from pallas_kernels.mosaic_tpu.sizes import LANES, NARROW, Sizes, choose
from pallas_kernels.mosaic_tpu.support import VMEM_SHARE

_FLOOR = -1e30  # below every logit and finite, so that exp(-inf - peak) is 0 and never NaN
_UNROLLED = 8  # KV heads
_HEADER = 2  # scalars before the items: their number and the window


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
    sizes = choose(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=kv_pages.shape[1],
        max_query_len=max_query_len, query_dtype=q.dtype, pool_dtype=kv_pages.dtype,
        budget=int(VMEM_SHARE * target.vmem_bytes()),
    )  # fmt: skip
    assert sizes is not None, "support.check lets only shapes pass that fit"
    num_seqs, pages_per_seq = block_tables.shape
    num_items = work.max_items(num_tokens, num_seqs, sizes.block_q, max_query_len)
    items, count = work.items(
        seq_lens, cu_query_lens, window, block_q=sizes.block_q, page_size=sizes.page_size, count=num_items
    )
    scalars = jnp.concatenate([jnp.stack([count, window]), *items])  # equal in all layers, so that XLA makes it once
    tiles = _tiles(q, sizes)
    num_tiles = tiles.shape[0]

    def of_tile(*shape: int) -> pl.BlockSpec:
        tile_field = _HEADER + work.Item._fields.index("tile") * num_items
        return pl.BlockSpec((1, *shape), lambda i, scalars, *_: (scalars[tile_field + i], *[jnp.int32(0)] * len(shape)))

    tile, lse_tile = (num_kv_heads, sizes.rows, sizes.width), (sizes.rows, sizes.lse_lanes)
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, num_items=num_items, pages_per_seq=pages_per_seq, logit_soft_cap=logit_soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_items,),
            in_specs=[of_tile(*tile), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_tile(*tile), of_tile(*lse_tile)],
            scratch_shapes=_Scratch(
                ring=pltpu.VMEM((sizes.slots, sizes.block_keys, sizes.lanes), kv_pages.dtype),
                arrived=pltpu.SemaphoreType.DMA((sizes.slots,)),
                cursor=pltpu.SMEM((4,), jnp.int32),
                acc=pltpu.VMEM((num_kv_heads * sizes.rows, sizes.width), jnp.float32),
                peak=pltpu.VMEM((num_kv_heads * sizes.rows, LANES), jnp.float32),
                total=pltpu.VMEM((num_kv_heads * sizes.rows, LANES), jnp.float32),
            ),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_tiles, *tile), q.dtype),
            jax.ShapeDtypeStruct((num_tiles, *lse_tile), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=sizes.vmem_bytes + sizes.vmem_bytes // 4,
            disable_bounds_checks=True,  # rows are clipped
        ),
        name="paged_attention",
    )(scalars, block_tables.reshape(-1), row_offset.reshape(1), scale.reshape(1), tiles, kv_pages)
    return _rows(out, lse, q, seq_lens, cu_query_lens, sizes)


def _tiles(q: Array, sizes: Sizes) -> Array:
    """q as [tiles, num_kv_heads, rows, width]: the rows of a KV head lie together, its query heads one by one."""
    num_tokens, _, head_dim = q.shape
    tiles = -(-num_tokens // sizes.block_q)
    q = jnp.pad(q, ((0, tiles * sizes.block_q - num_tokens), (0, 0), (0, sizes.width - head_dim)))
    q = q.reshape(tiles, sizes.block_q, sizes.num_kv_heads, sizes.group, sizes.width).transpose(0, 2, 3, 1, 4)
    q = q.reshape(tiles, sizes.num_kv_heads, sizes.group * sizes.block_q, sizes.width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, sizes.rows - q.shape[2]), (0, 0)))


def _rows(out: Array, lse: Array, q: Array, seq_lens: Array, cu_query_lens: Array, sizes: Sizes) -> tuple[Array, Array]:
    """The inverse of `_tiles` for both results, with zeros and -inf in the rows that no item wrote."""
    num_tokens, num_heads, head_dim = q.shape
    tiles, heads, group, block_q = out.shape[0], sizes.num_kv_heads, sizes.group, sizes.block_q
    # At head_dim 64 the value's lanes are the last ones.
    out = out[:, :, : group * block_q, sizes.width - head_dim :].reshape(tiles, heads, group, block_q, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(tiles * block_q, num_heads, head_dim)[:num_tokens]
    lse = lse[:, : group * block_q, :heads].reshape(tiles, group, block_q, heads)
    lse = lse.transpose(0, 2, 3, 1).reshape(tiles * block_q, num_heads)[:num_tokens]
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    owned = ((token >= cu_query_lens[:-1]) & (token < cu_query_lens[1:]) & (seq_lens > 0)).any(axis=1)
    return jnp.where(owned[:, None, None], out, 0), jnp.where(owned[:, None], lse, -jnp.inf)


class _Scratch(NamedTuple):
    """Memory of the kernel.

    Attributes:
      ring: [slots, block_keys, lanes] blocks of keys and values.
      arrived: a DMA semaphore for each slot.
      cursor: item and block that is copied next, blocks whose copies were started, blocks computed on.
      acc: [num_kv_heads * rows, width] unnormalised output.
      peak: [num_kv_heads * rows, LANES] running maximum of the logits, the same in all lanes.
      total: [num_kv_heads * rows, LANES] running sum of the weights, spread over the lanes.
    """

    ring: Any
    arrived: Any
    cursor: Any
    acc: Any
    peak: Any
    total: Any


_NEXT_ITEM, _NEXT_BLOCK, _STARTED, _DONE = range(4)


def _kernel(
    scalars: Any, tables: Any, row_offset: Any, scale: Any, q: Any, pool: Any, out: Any, lse: Any, *scratch: Any,
    sizes: Sizes, num_items: int, pages_per_seq: int, logit_soft_cap: float | None,
) -> None:  # fmt: skip
    memory = _Scratch(*scratch)
    count, window = (scalars[i] for i in range(_HEADER))

    def item(i: Array) -> work.Item:
        return work.Item(*(scalars[_HEADER + field * num_items + i] for field in range(work.NUM_FIELDS)))

    blocks = _Blocks(sizes, item, count, row_offset[0], pages_per_seq, tables, pool, memory)
    index = pl.program_id(0)

    @pl.when(index == 0)
    def _() -> None:
        blocks.begin()

    mine = item(index)
    narrow_start = mine.first_row // NARROW * NARROW
    fits_narrow = mine.end_row <= narrow_start + NARROW
    attend = partial(_attend, sizes, mine, blocks, window, scale, logit_soft_cap, q, out, lse, memory)
    if sizes.block_q <= NARROW:
        pl.when(index < count)(partial(attend, jnp.int32(0), sizes.block_q))
    else:
        pl.when((index < count) & fits_narrow)(partial(attend, narrow_start, NARROW))
        pl.when((index < count) & ~fits_narrow)(partial(attend, jnp.int32(0), sizes.block_q))


class _Blocks(NamedTuple):
    """Blocks of keys: which there are, and their copies. Block b of a sequence starts at key b * block_keys."""

    sizes: Sizes
    item: Any
    count: Array
    row_offset: Array
    pages_per_seq: int
    tables: Any
    pool: Any
    memory: _Scratch

    def span(self, item: work.Item) -> tuple[Array, Array]:
        """The item's blocks: first, and past the last."""
        per_block = self.sizes.pages_per_block
        return item.first_page // per_block, (item.end_page + per_block - 1) // per_block

    def pages(self, item: work.Item, block: Array) -> tuple[Array, Array]:
        """The block's pages that are read, relative to its first: from, up to."""
        first = block * self.sizes.pages_per_block
        return jnp.maximum(item.first_page - first, 0), jnp.minimum(item.end_page - first, self.sizes.pages_per_block)

    def page(self, slot: Array, page: Array) -> Any:
        """Where page `page` of a block lies in the ring."""
        rows = pl.ds(pl.multiple_of(page * self.sizes.page_size, self.sizes.page_size), self.sizes.page_size)
        return self.memory.ring.at[slot, rows]

    def when_whole(self, first: Array, end: Array, whole: Callable[[], None], partly: Callable[[], None]) -> None:
        """Runs `whole` if all pages of a block are read, which is the common case, or else `partly`."""
        is_whole = (first == 0) & (end == self.sizes.pages_per_block)
        pl.when(is_whole)(whole)
        pl.when(~is_whole)(partly)

    def begin(self) -> None:
        """Starts the copies of the launch's first blocks."""
        cursor = self.memory.cursor
        cursor[_NEXT_ITEM] = jnp.int32(0)
        cursor[_NEXT_BLOCK] = self.span(self.item(jnp.int32(0)))[0]
        cursor[_STARTED] = jnp.int32(0)
        cursor[_DONE] = jnp.int32(0)
        lax.fori_loop(0, self.sizes.slots - 1, lambda _, carry: self.start_next() or carry, None)

    def start_next(self) -> None:
        """Starts the copies of the next block, if there is one, and moves the cursor past it."""
        cursor = self.memory.cursor
        index, block = cursor[_NEXT_ITEM], cursor[_NEXT_BLOCK]

        @pl.when(index < self.count)
        def _() -> None:
            item = self.item(index)
            slot = lax.rem(cursor[_STARTED], jnp.int32(self.sizes.slots))
            first, end = self.pages(item, block)
            column = item.seq * self.pages_per_seq + block * self.sizes.pages_per_block

            def start(page: Any, _: None) -> None:
                row = jnp.clip(self.tables[column + page] + self.row_offset, 0, self.pool.shape[0] - 1)
                pltpu.make_async_copy(self.pool.at[row], self.page(slot, page), self.memory.arrived.at[slot]).start()

            self.when_whole(
                first,
                end,
                lambda: [start(jnp.int32(page), None) for page in range(self.sizes.pages_per_block)] and None,
                lambda: lax.fori_loop(first, end, start, None),
            )
            cursor[_STARTED] += 1
            is_last = block + 1 >= self.span(item)[1]
            following = jnp.minimum(index + 1, self.count - 1)
            cursor[_NEXT_ITEM] = jnp.where(is_last, index + 1, index)
            cursor[_NEXT_BLOCK] = jnp.where(is_last, self.span(self.item(following))[0], block + 1)

    def wait(self, item: work.Item, block: Array) -> Array:
        """Waits for the oldest block, which is this one, and returns its slot; unowned slots of it are zeros then."""
        slot = lax.rem(self.memory.cursor[_DONE], jnp.int32(self.sizes.slots))
        first, end = self.pages(item, block)

        def wait(page: Array, _: None) -> None:
            pltpu.make_async_copy(self.pool.at[0], self.page(slot, page), self.memory.arrived.at[slot]).wait()

        def wait_for_whole() -> None:
            block = self.memory.ring.at[slot]
            pltpu.make_async_copy(block, block, self.memory.arrived.at[slot]).wait()

        def clear(page: Array, _: None) -> None:
            ref = self.page(slot, page)
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

        def wait_for_pages() -> None:
            lax.fori_loop(first, end, wait, None)
            lax.fori_loop(0, first, clear, None)
            lax.fori_loop(end, self.sizes.pages_per_block, clear, None)

        self.when_whole(first, end, wait_for_whole, wait_for_pages)

        length = item.position + item.end_row - block * self.sizes.block_keys  # keys of the block up to the last seen
        last_page = end - 1

        @pl.when(length < end * self.sizes.page_size)
        def _() -> None:
            ref = self.page(slot, last_page)
            key = last_page * self.sizes.page_size + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
            # Through float32: not every chip selects 16-bit values.
            ref[...] = jnp.where(key < length, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)

        return slot


def _attend(
    sizes: Sizes, item: work.Item, blocks: _Blocks, window: Array, scale: Any, soft_cap: float | None, q: Any, out: Any,
    lse: Any, memory: _Scratch, start: Array, span: int,
) -> None:  # fmt: skip
    """One item, computed on the tile's tokens `start .. start + span - 1`."""
    heads, whole = sizes.num_kv_heads, span == sizes.block_q
    rows = sizes.rows if whole else sizes.group * span
    aligned = start if whole else pl.multiple_of(start, span)

    def parts() -> list[tuple[slice, Any]]:
        """Where the rows lie: (slice of the computed rows, slice of the tile's rows)."""
        if whole:
            return [(slice(0, rows), slice(None))]
        return [(slice(g * span, (g + 1) * span), pl.ds(g * sizes.block_q + aligned, span)) for g in range(sizes.group)]

    def queries(head: Any) -> Array:
        return jnp.concatenate([q[0, head, of_tile] for _, of_tile in parts()], axis=0)

    every = slice(0, heads * rows)
    memory.acc[every] = jnp.zeros((heads * rows, sizes.width), jnp.float32)
    memory.peak[every] = jnp.full((heads * rows, LANES), _FLOOR, jnp.float32)
    memory.total[every] = jnp.zeros((heads * rows, LANES), jnp.float32)

    at_once = sizes.heads_at_once(rows)
    chunk_rows = at_once * rows

    def step(block: Array, _: None) -> None:
        blocks.start_next()
        slot = blocks.wait(item, block)
        # How far a row of the tile lies behind a key of the block, less what differs between rows and keys.
        behind = item.position + start - block * sizes.block_keys

        def attend_heads(chunk: Any) -> None:
            chunk_heads = [chunk * at_once + i for i in range(at_once)]
            of_chunk = _window(chunk * chunk_rows, chunk_rows)
            shape = (chunk_rows, sizes.block_keys)
            row = lax.broadcasted_iota(jnp.int32, shape, 0) & (span - 1)
            distance = behind + (row - lax.broadcasted_iota(jnp.int32, shape, 1))
            logits = [_times_keys(queries(head), _key(memory.ring, slot, head, sizes)) for head in chunk_heads]
            logits = jnp.concatenate(logits, axis=0) * scale[0]
            if soft_cap is not None:
                logits = soft_cap * jnp.tanh(logits / soft_cap)
            logits = jnp.where((distance >= 0) & (distance < window), logits, -jnp.inf)

            old_peak = memory.peak[of_chunk]
            peak = jnp.maximum(old_peak, logits.max(axis=1, keepdims=True))
            weights = jnp.exp(logits - _across(peak, sizes.block_keys))
            decay = jnp.exp(old_peak - peak)
            memory.peak[of_chunk] = peak
            by_lane = [weights[:, lane : lane + LANES] for lane in range(0, sizes.block_keys, LANES)]
            memory.total[of_chunk] = memory.total[of_chunk] * decay + sum(by_lane[1:], by_lane[0])
            values = [
                _times_values(weights[i * rows : (i + 1) * rows], _value(memory.ring, slot, head, sizes))
                for i, head in enumerate(chunk_heads)
            ]
            memory.acc[of_chunk] = memory.acc[of_chunk] * _across(decay, sizes.width) + jnp.concatenate(values, axis=0)

        _for_each(heads // at_once, attend_heads)
        memory.cursor[_DONE] += 1

    first_block, end_block = blocks.span(item)
    lax.fori_loop(first_block, end_block, step, None)

    lane = lax.broadcasted_iota(jnp.int32, (rows, sizes.lse_lanes), 1)
    token = start + (lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) & (span - 1))
    owned = (token >= item.first_row) & (token < item.end_row)

    def finish_head(head: Array, sums: Array) -> Array:
        of_head = _window(head * rows, rows)
        total = jnp.broadcast_to(memory.total[of_head].sum(axis=1, keepdims=True), (rows, LANES))
        seen = total > 0
        result = memory.acc[of_head] * _across(jnp.where(seen, 1.0 / total, 0.0), sizes.width)
        log = jnp.where(seen, memory.peak[of_head] + jnp.log(total), -jnp.inf)
        for of_rows, of_tile in parts():
            mask = _across(owned[of_rows], sizes.width)
            before = out[0, head, of_tile].astype(jnp.float32)
            out[0, head, of_tile] = jnp.where(mask, result[of_rows], before).astype(out.dtype)
        return jnp.where(lane == head, _across(log, sizes.lse_lanes), sums)

    sums = lax.fori_loop(0, heads, finish_head, jnp.zeros((rows, sizes.lse_lanes), jnp.float32))
    for of_rows, of_tile in parts():
        lse[0, of_tile] = jnp.where(_across(owned[of_rows], sizes.lse_lanes), sums[of_rows], lse[0, of_tile])


def _for_each(count: int, body: Callable[[Any], None]) -> None:
    """Unrolled where that stays small: with static slices the compiler overlaps one head's products with another's."""
    if count <= _UNROLLED:
        for i in range(count):
            body(i)
    else:
        lax.fori_loop(0, count, lambda i, _: body(i), None)


def _key(ring: Any, slot: Array, head: Any, sizes: Sizes) -> Array:
    """The lanes to take with the queries: the key, and at head_dim 64 the value too, against zeros in q."""
    return ring[slot, :, _window(head * 2 * sizes.head_dim, sizes.width)]


def _value(ring: Any, slot: Array, head: Any, sizes: Sizes) -> Array:
    """The lanes to take with the weights: the value, and at head_dim 64 the key before it."""
    return ring[slot, :, _window((head + 1) * 2 * sizes.head_dim - sizes.width, sizes.width)]


def _window(start: Any, size: int) -> Any:
    """`size` rows or lanes from `start` on, which is a multiple of 8 rows or 128 lanes."""
    return (
        slice(start, start + size)
        if isinstance(start, int)
        else pl.ds(pl.multiple_of(start, math.gcd(size, LANES)), size)
    )


def _times_keys(q: Array, k: Array) -> Array:
    """q[rows, width] k[keys, width]^T in float32; exact products if both are bfloat16."""
    if q.dtype == k.dtype == jnp.bfloat16:
        return lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.dot_general(
        q.astype(jnp.float32), k.astype(jnp.float32), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _times_values(weights: Array, v: Array) -> Array:
    """weights[rows, keys] (float32) v[keys, width] in float32.

    Against a bfloat16 v the weights are cut into two bfloat16 summands, which are rows of one product: the first 8
    significant bits, and the rest rounded to 8, so that a weight is off by at most 2**-17 of itself.
    """
    if v.dtype == jnp.float32:
        return jnp.dot(weights, v, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    bits = lax.bitcast_convert_type(weights, jnp.int32) & jnp.int32(-(2**16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    halves = jnp.concatenate([high.astype(v.dtype), (weights - high).astype(v.dtype)], axis=0)
    product = jnp.dot(halves, v, preferred_element_type=jnp.float32)
    return product[: weights.shape[0]] + product[weights.shape[0] :]


def _across(x: Array, width: int) -> Array:
    """x[rows, LANES], the same in all lanes, widened to `width` lanes."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)
