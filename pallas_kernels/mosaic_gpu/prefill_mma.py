"""The prefill kernel for any GPU: one warpgroup a tile, products of registers (`plgpu.mma`).

Keys and values come through the ring of `pallas_kernels.mosaic_gpu.ring`, as in decode.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu import compat, softmax
from pallas_kernels.mosaic_gpu.query_tile import query_tile
from pallas_kernels.mosaic_gpu.ring import Ring, Tile, ring_for_two_blocks, swizzled
from pallas_kernels.mosaic_gpu.target import Target

ROWS: Final = 64
"""Rows of a tile: those of one warpgroup's product."""

_KEYS: Final = 64  # of a tile
_DEPTH: Final = 64  # lanes of one product: a swizzled tile's, and few registers
_MAX_KEPT: Final = 128  # head_dim up to which registers hold the queries; of wider heads every tile reads them anew


def attend_tiles(
    q: Array,
    tiles: Array,
    kv_pages: Array,
    kv_scales: Array | None,
    block_tables: Array,
    row_offset: Array,
    scale: Array,
    window: Array,
    *,
    gpu: Target,
    group: int,
    logit_soft_cap: float | None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.mosaic_gpu.prefill`; returns (out, lse)."""
    num_tiles, num_kv_heads, rows, head_dim = q.shape
    ring = ring_for_two_blocks(gpu, _KEYS, q.dtype, kv_pages, head_dim)

    def prefill(*refs: Any, **scratch: Any) -> None:  # the name is the kernel's
        _body(ring, group, logit_soft_cap, *refs, **scratch)

    return plgpu.kernel(
        prefill,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        scratch_types={
            **ring.scratch(),
            "weights": plgpu.SMEM((rows, ring.keys), q.dtype, transforms=swizzled(q.dtype)),
        },
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, tiles, kv_pages, kv_scales, block_tables, row_offset.reshape(1), scale.reshape(1), window.reshape(1))


def _body(
    ring: Ring,
    group: int,
    soft_cap: float | None,
    q: Any,
    tiles: Any,
    kv_pages: Any,
    kv_scales: Any,
    block_tables: Any,
    row_offset: Any,
    scale: Any,
    window: Any,
    out: Any,
    lse: Any,
    **scratch: Any,
) -> None:
    rows, head_dim = q.shape[-2:]
    block = query_tile(ring, scratch, tiles, kv_pages, kv_scales, block_tables, row_offset, window)
    to_log2, window = softmax.log2_logits(scale[0], soft_cap), window[0]
    at = block.index, block.head

    def load_queries(depth: int) -> Any:
        return plgpu.load(q.at[*at, :, pl.ds(depth, _DEPTH)], optimized=False)

    depths = range(0, head_dim, _DEPTH)
    kept = {depth: load_queries(depth) for depth in depths if head_dim <= _MAX_KEPT}

    def step(tile: Tile, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        accs, peak, total = carry
        shape = (rows, ring.keys)
        position = block.first_query + lax.broadcasted_iota(jnp.int32, shape, 0) // group
        key = tile.first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = (key <= position) & (key > position - window)
        logits = jnp.zeros(shape, jnp.float32)
        for depth in depths:
            queries = kept[depth] if kept else load_queries(depth)
            logits = plgpu.mma(logits, queries, plgpu.load(tile.kv.at[:, pl.ds(depth, _DEPTH)].T))
        logits = jnp.where(visible, to_log2(tile.scale_logits(logits, axis=1)), softmax.FLOOR)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, shape, [0]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(axis=1)

        @pl.when(tile.first_key + ring.keys > block.end)
        def _() -> None:
            key = tile.first_key + lax.broadcasted_iota(jnp.int32, (ring.keys, _DEPTH), 0)
            for depth in depths:
                values = tile.kv.at[:, pl.ds(head_dim + depth, _DEPTH)]
                values[...] = jnp.where(key < block.end, values[...], jnp.zeros((), values.dtype))  # 0 x NaN is NaN

        scratch["weights"][...] = tile.scale_weights(weights, visible, axis=1).astype(ring.dtype)
        rounded = plgpu.load(scratch["weights"])

        def absorb(acc: Any, depth: int) -> Any:
            values = plgpu.load(tile.kv.at[:, pl.ds(head_dim + depth, _DEPTH)])
            return plgpu.mma(acc * lax.broadcast_in_dim(decay, acc.shape, [0]), rounded, values)

        return tuple(map(absorb, accs, depths)), new_peak, total

    nothing = (
        tuple(jnp.zeros((rows, _DEPTH), jnp.float32) for _ in depths),
        jnp.full((rows,), softmax.FLOOR, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    accs, peak, total = block.stream.fold(step, nothing)
    divisor = jnp.where(total > 0, total, 1.0) * ring.value_unit
    for acc, depth in zip(accs, depths, strict=True):
        result = acc / lax.broadcast_in_dim(divisor, acc.shape, [0])
        compat.store(out.at[*at, :, pl.ds(depth, _DEPTH)], result.astype(out.dtype))
    compat.store(lse.at[at], jnp.where(total > 0, (peak + jnp.log2(total)) / softmax.LOG2E, -jnp.inf))
