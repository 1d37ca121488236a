"""The kernel: queries of a tile against the pages of their sequence, with the copies of later blocks in flight.

The grid walks the work items. An item loops over blocks of its sequence's keys; each page of a block is one copy that
brings all heads' keys and values from HBM into a ring in VMEM. A cursor in scalar memory runs `slots - 1` blocks ahead
of the computation, across items, so that only the first block of a launch is waited for from its start.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import target, work
from pallas_kernels.mosaic_tpu.ring import DONE, Memory, Ring, scratch
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
    pool = [kv_pages] if kv_scales is None else [kv_pages, kv_scales]
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
        partial(_kernel, sizes, num_items, pages_per_seq, logit_soft_cap, kv_scales is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_items,),
            in_specs=[of_tile(*tile), *[pl.BlockSpec(memory_space=pl.ANY) for _ in pool]],
            out_specs=[of_tile(*tile), of_tile(*lse_tile)],
            scratch_shapes=scratch(sizes, kv_pages.dtype, quantised=kv_scales is not None),
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
    )(scalars, block_tables.reshape(-1), row_offset.reshape(1), scale.reshape(1), tiles, *pool)
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


def _kernel(
    sizes: Sizes, num_items: int, pages_per_seq: int, soft_cap: float | None, quantised: bool,
    scalars: Any, tables: Any, row_offset: Any, scale: Any, q: Any, *refs: Any,
) -> None:  # fmt: skip
    if quantised:
        pool, pool_scales, out, lse, *kept, ring_scales, scales = refs
        memory = Memory(pool, *kept)._replace(pool_scales=pool_scales, ring_scales=ring_scales, scales=scales)
    else:
        pool, out, lse, *kept = refs
        memory = Memory(pool, *kept)
    count, window = (scalars[i] for i in range(_HEADER))

    def item(i: Array) -> work.Item:
        return work.Item(*(scalars[_HEADER + field * num_items + i] for field in range(work.NUM_FIELDS)))

    ring = Ring(sizes, item, count, row_offset[0], pages_per_seq, tables, memory)
    index = pl.program_id(0)

    @pl.when(index == 0)
    def begin() -> None:
        ring.begin()

    mine = item(index)
    narrow_start = mine.first_row // NARROW * NARROW
    fits_narrow = mine.end_row <= narrow_start + NARROW
    attend = partial(_attend, sizes, mine, ring, window, scale, soft_cap, q, out, lse)
    if sizes.block_q <= NARROW:
        pl.when(index < count)(partial(attend, jnp.int32(0), sizes.block_q))
    else:
        pl.when((index < count) & fits_narrow)(partial(attend, narrow_start, NARROW))
        pl.when((index < count) & ~fits_narrow)(partial(attend, jnp.int32(0), sizes.block_q))


def _attend(
    sizes: Sizes, item: work.Item, ring: Ring, window: Array, scale: Any, soft_cap: float | None, q: Any, out: Any,
    lse: Any, start: Array, span: int,
) -> None:  # fmt: skip
    """One item, computed on the tile's tokens `start .. start + span - 1`."""
    heads, whole, memory = sizes.num_kv_heads, span == sizes.block_q, ring.memory
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
        ring.start_next()
        slot = ring.wait(item, block)
        owned = ring.owned(item, block)
        # How far a row of the tile lies behind a key of the block, less what differs between rows and keys.
        behind = item.position + start - block * sizes.block_keys

        def attend_heads(chunk: Any) -> None:
            chunk_heads = [chunk * at_once + i for i in range(at_once)]
            of_chunk = _window(chunk * chunk_rows, chunk_rows)
            shape = (chunk_rows, sizes.block_keys)
            row = lax.broadcasted_iota(jnp.int32, shape, 0) & (span - 1)
            distance = behind + (row - lax.broadcasted_iota(jnp.int32, shape, 1))
            by_head = [_times_keys(queries(head), memory, slot, head, sizes) for head in chunk_heads]
            logits = jnp.concatenate(by_head, axis=0) * scale[0]
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
                _times_values(weights[i * rows : (i + 1) * rows], memory, slot, head, sizes, q.dtype, owned)
                for i, head in enumerate(chunk_heads)
            ]
            memory.acc[of_chunk] = memory.acc[of_chunk] * _across(decay, sizes.width) + jnp.concatenate(values, axis=0)

        _for_each(heads // at_once, attend_heads)
        memory.cursor[DONE] += 1

    first_block, end_block = ring.span(item)
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


def _times_keys(q: Array, memory: Memory, slot: Array, head: Any, sizes: Sizes) -> Array:
    """q[rows, width] times a head's keys, [rows, block_keys] in float32; exact products if both are bfloat16.

    At head_dim 64 the lanes hold the value too, and q zeros against it.
    """
    k = memory.ring[slot, :, _window(head * 2 * sizes.head_dim, sizes.width)]
    if memory.scales is not None:
        k = k.astype(jnp.float32).astype(q.dtype)  # codes are exact in bfloat16
    dims = (((1,), (1,)), ((), ()))
    if q.dtype == k.dtype == jnp.bfloat16:
        logits = lax.dot_general(q, k, dims, preferred_element_type=jnp.float32)
    else:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        logits = lax.dot_general(q, k, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return logits if memory.scales is None else logits * memory.scales[pl.ds(2 * head, 1), :]


def _times_values(
    weights: Array, memory: Memory, slot: Array, head: Any, sizes: Sizes, dtype: Any, owned: tuple[Array, Array]
) -> Array:
    """weights[rows, block_keys] (float32) times a head's values, [rows, width] in float32.

    Against bfloat16 the weights are cut into two bfloat16 summands, which are rows of one product: the first 8
    significant bits, and the rest rounded to 8, so that a weight is off by at most 2**-17 of itself.

    At head_dim 64 the lanes hold the key too, before the value.
    """
    v = memory.ring[slot, :, _window((head + 1) * 2 * sizes.head_dim - sizes.width, sizes.width)]
    if memory.scales is not None:
        weights = weights * memory.scales[pl.ds(2 * head + 1, 1), :]
        key = lax.broadcasted_iota(jnp.int32, v.shape, 0)
        v = jnp.where((key >= owned[0]) & (key < owned[1]), v.astype(jnp.float32), 0.0).astype(dtype)
    if v.dtype == jnp.float32:
        return jnp.dot(weights, v, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    bits = lax.bitcast_convert_type(weights, jnp.int32) & jnp.int32(-(2**16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    halves = jnp.concatenate([high.astype(v.dtype), (weights - high).astype(v.dtype)], axis=0)
    product = jnp.dot(halves, v, preferred_element_type=jnp.float32)
    return product[: weights.shape[0]] + product[weights.shape[0] :]


def _window(start: Any, size: int) -> Any:
    """`size` rows or lanes from `start` on, which is a multiple of 8 rows or 128 lanes."""
    return (
        slice(start, start + size)
        if isinstance(start, int)
        else pl.ds(pl.multiple_of(start, math.gcd(size, LANES)), size)
    )


def _across(x: Array, width: int) -> Array:
    """x[rows, LANES], the same in all lanes, widened to `width` lanes."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)
