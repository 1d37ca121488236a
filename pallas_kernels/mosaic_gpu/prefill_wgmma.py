"""The prefill kernel for Hopper: two warpgroups compute, a third one copies; products are `wgmma`.

The copying warpgroup runs ahead through a ring of stages, each with a barrier that says full and one that says free.
A computing warpgroup has 64 rows. It issues the product of the next tile's keys before it works on this tile's
softmax, so that the tensor cores have work meanwhile.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu import compat, softmax
from pallas_kernels.mosaic_gpu.query_tile import QueryTile, query_tile
from pallas_kernels.mosaic_gpu.ring import Ring, Stream, swizzled
from pallas_kernels.mosaic_gpu.target import Target

_WARPGROUPS: Final = 2
_WARPGROUP_ROWS: Final = 64
_KEYS: Final = 64  # of a tile: the registers of two tiles' logits beside the output's
_RESERVED: Final = 4096  # shared memory for barriers and reductions
_MAX_STAGES: Final = 4

MAX_HEAD_DIM: Final = 128
"""The output of a wider head does not fit in the registers of its rows."""

ROWS: Final = _WARPGROUPS * _WARPGROUP_ROWS
"""Rows of a tile."""


def attend_tiles(
    q: Array,
    tiles: Array,
    kv_pages: Array,
    kv_scales: None,
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
    stage_bytes, rows_bytes = _KEYS * 2 * head_dim * 2, rows * (head_dim + _KEYS) * 2
    stages = min(_MAX_STAGES, (gpu.shared_memory - _RESERVED - rows_bytes) // stage_bytes)
    ring = Ring(gpu, stages, _KEYS, kv_pages.shape[1], head_dim, q.dtype, kv_pages.dtype)

    def prefill(*refs: Any, **scratch: Any) -> None:
        _body(ring, group, logit_soft_cap, *refs, **scratch)

    return plgpu.kernel(
        prefill,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        scratch_types={
            **ring.scratch(),
            "queries": plgpu.SMEM((_WARPGROUPS, _WARPGROUP_ROWS, head_dim), q.dtype, transforms=swizzled(q.dtype)),
            "weights": plgpu.SMEM((_WARPGROUPS, _WARPGROUP_ROWS, _KEYS), q.dtype, transforms=swizzled(q.dtype)),
            "queries_full": plgpu.Barrier(num_barriers=_WARPGROUPS),
            "free": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
            "landed": plgpu.Barrier(num_arrivals=ring.copies),
        },
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile", "head"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, tiles, kv_pages, kv_scales, block_tables, row_offset.reshape(1), scale.reshape(1), window.reshape(1))


def _body(
    ring: Ring,
    group: int,
    soft_cap: float | None,
    q: Any,
    tiles: Any,
    kv_pages: Any,
    kv_scales: None,
    block_tables: Any,
    row_offset: Any,
    scale: Any,
    window: Any,
    out: Any,
    lse: Any,
    **scratch: Any,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    block = query_tile(ring, scratch, tiles, kv_pages, kv_scales, block_tables, row_offset, window)
    has_work = block.stream.count > 0

    @pl.when(has_work & (warpgroup < _WARPGROUPS))
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(pl.multiple_of(warpgroup * _WARPGROUP_ROWS, _WARPGROUP_ROWS), _WARPGROUP_ROWS)
        at = block.index, block.head, rows
        to_log2 = softmax.log2_logits(scale[0], soft_cap)
        _compute(block, group, to_log2, warpgroup, window[0], q.at[at], out.at[at], lse.at[at])

    @pl.when(has_work & (warpgroup == _WARPGROUPS))
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _copy(block.stream, block.end)


def _copy(stream: Stream, end: Any) -> None:
    """The copying warpgroup: every tile into its stage, the last one with zeros for the values from `end` on.

    It ends when all stages are free again: a barrier must not go while a phase is left that its reader has not seen.
    """
    ring, scratch, last = stream.ring, stream.scratch, stream.count - 1

    def step(tile: Any, rows: tuple[Any, ...]) -> tuple[Any, ...]:
        stage = stream.stage(tile)

        @pl.when(tile >= ring.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["free"].at[stage])

        @pl.when(tile < last)
        def _() -> None:
            stream.copy(tile, rows, scratch["full"].at[stage])

        @pl.when(tile == last)
        def _() -> None:
            stream.copy(tile, rows, scratch["landed"])
            plgpu.barrier_wait(scratch["landed"])
            first_key = stream.first_key + tile * ring.keys

            part, layout = (64, 64), plgpu.Layout.WGMMA
            for row in range(0, ring.keys, part[0]):
                key = first_key + row + plgpu.broadcasted_iota(jnp.int32, part, 0, layout=layout)
                for lane in range(ring.head_dim, 2 * ring.head_dim, part[1]):
                    values = scratch["buffer"].at[stage, pl.ds(row, part[0]), pl.ds(lane, part[1])]
                    zeros = plgpu.layout_cast(jnp.zeros(part, ring.dtype), layout)
                    values[...] = jnp.where(key < end, plgpu.load(values, layout=layout), zeros)  # 0 x NaN is NaN
            plgpu.commit_smem()
            for _ in range(ring.copies):
                plgpu.barrier_arrive(scratch["full"].at[stage])

        return stream.rows(tile + 1)

    def wait_until_free(stage: Any, _: None) -> None:
        plgpu.barrier_wait(scratch["free"].at[stage])

    lax.fori_loop(0, stream.count, step, stream.rows(0))
    lax.fori_loop(0, jnp.minimum(stream.count, ring.stages), wait_until_free, None)


def _compute(
    block: QueryTile,
    group: int,
    to_log2: Callable[[Any], Any],
    warpgroup: Any,
    window: Any,
    q: Any,
    out: Any,
    lse: Any,
) -> None:
    """A computing warpgroup: the online softmax of its 64 rows over all tiles."""
    stream = block.stream
    ring, scratch = stream.ring, stream.scratch
    head_dim, keys, rows = ring.head_dim, ring.keys, _WARPGROUP_ROWS
    queries, weights_ref = scratch["queries"].at[warpgroup], scratch["weights"].at[warpgroup]
    plgpu.copy_gmem_to_smem(q, queries, scratch["queries_full"].at[warpgroup])
    plgpu.barrier_wait(scratch["queries_full"].at[warpgroup])

    def issue_logits(ref: Any, tile: Any) -> None:
        stage = stream.stage(tile)
        plgpu.barrier_wait(scratch["full"].at[stage])
        plgpu.wgmma(ref, queries, scratch["buffer"].at[stage, :, pl.ds(0, head_dim)].T)

    def first_logits(ref: Any) -> Any:
        issue_logits(ref, jnp.int32(0))
        return ref[...]

    def absorb(tile: Any, carry: tuple[Any, ...], products: Any) -> tuple[Any, ...]:
        """The carry with a tile's keys and values, given q k^T."""
        acc, peak, total = carry
        shape = (rows, keys)
        row = warpgroup * rows + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        position = block.first_query + row // group
        key = stream.first_key + tile * keys + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        visible = (key <= position) & (key > position - window)
        logits = jnp.where(visible, to_log2(products), softmax.FLOOR)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, shape, [0]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(axis=1)
        weights_ref[...] = weights.astype(ring.dtype)
        plgpu.commit_smem()
        stage = stream.stage(tile)

        def weighted(ref: Any) -> Any:
            plgpu.wgmma(ref, weights_ref, scratch["buffer"].at[stage, :, pl.ds(head_dim, head_dim)])
            return ref[...]

        product = pl.run_scoped(weighted, plgpu.WGMMAAccumulatorRef((rows, head_dim), jnp.float32))
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + product
        plgpu.barrier_arrive(scratch["free"].at[stage])
        return acc, new_peak, total

    def step(tile: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        carry, products = state

        def overlapped(ref: Any) -> tuple[Any, ...]:
            issue_logits(ref, tile + 1)
            after = absorb(tile, carry, products)
            return after, ref[...]

        return pl.run_scoped(overlapped, plgpu.WGMMAAccumulatorRef((rows, keys), jnp.float32))

    by_row = plgpu.Layout.WGMMA.reduce(1)
    nothing = (
        plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((rows,), softmax.FLOOR, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
    )
    products = pl.run_scoped(first_logits, plgpu.WGMMAAccumulatorRef((rows, keys), jnp.float32))
    last = stream.count - 1
    carry, products = lax.fori_loop(0, last, step, (nothing, products))
    acc, peak, total = absorb(last, carry, products)

    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    queries[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(ring.dtype)
    compat.store(lse, jnp.where(total > 0, (peak + jnp.log2(total)) / softmax.LOG2E, -jnp.inf))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, out)
    plgpu.wait_smem_to_gmem(0)
