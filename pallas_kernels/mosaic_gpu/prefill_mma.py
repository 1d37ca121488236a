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
from pallas_kernels.mosaic_gpu.ring import Ring, Stream, keys_of_32_kib, stages_for_two_blocks
from pallas_kernels.mosaic_gpu.target import Target

ROWS: Final = 64
"""Rows of a tile: those of one warpgroup's product."""

_DEPTH: Final = 64  # lanes of one product: a swizzled tile's


def attend_tiles(
    q: Array,
    tiles: Array,
    kv_pages: Array,
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
    ring = Ring(gpu, stages_for_two_blocks(gpu), keys_of_32_kib(head_dim), kv_pages.shape[1], head_dim, kv_pages.dtype)

    def prefill(*refs: Any, **scratch: Any) -> None:  # the name is the kernel's
        _body(ring, group, logit_soft_cap, *refs, **scratch)

    return plgpu.kernel(
        prefill,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        scratch_types={
            **ring.scratch(),
            "weights": plgpu.SMEM((rows, ring.keys), q.dtype, transforms=ring.transforms()),
        },
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, tiles, kv_pages, block_tables, row_offset.reshape(1), scale.reshape(1), window.reshape(1))


def _body(
    ring: Ring,
    group: int,
    soft_cap: float | None,
    q: Any,
    tiles: Any,
    kv_pages: Any,
    block_tables: Any,
    row_offset: Any,
    scale: Any,
    window: Any,
    out: Any,
    lse: Any,
    **scratch: Any,
) -> None:
    head = lax.axis_index("head")
    index = q.shape[0] - 1 - lax.axis_index("tile")  # a sequence's last tiles see most: they go first
    rows, head_dim = q.shape[-2:]
    seq, first_query, num_queries = (tiles[index, i] for i in range(3))
    end = first_query + num_queries  # one past the last position that the tile sees
    to_log2 = softmax.log2_logits(scale[0], soft_cap)
    window = window[0]
    first_key = jnp.maximum(first_query - window + 1, 0) // ring.copy_keys * ring.copy_keys
    count = jnp.where(num_queries > 0, (end - first_key + ring.keys - 1) // ring.keys, 0)
    stream = Stream(
        ring, scratch, kv_pages, block_tables, row_offset[0], seq, head, first_key, count,
        last_page=jnp.maximum(end - 1, 0) // ring.page_size,
    )  # fmt: skip
    queries = [plgpu.load(q.at[index, head, :, pl.ds(d, _DEPTH)], optimized=False) for d in range(0, head_dim, _DEPTH)]

    def step(tile: Any, first_key: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        acc, peak, total = carry
        shape = (rows, ring.keys)
        position = first_query + lax.broadcasted_iota(jnp.int32, shape, 0) // group
        key = first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = (key <= position) & (key > position - window)
        logits = jnp.zeros(shape, jnp.float32)
        for i, part in enumerate(queries):
            logits = plgpu.mma(logits, part, plgpu.load(tile.at[:, pl.ds(i * _DEPTH, _DEPTH)].T))
        logits = jnp.where(visible, to_log2(logits), softmax.FLOOR)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, shape, [0]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])

        values = tile.at[:, pl.ds(head_dim, head_dim)]

        @pl.when(first_key + ring.keys > end)
        def _() -> None:
            key = first_key + lax.broadcasted_iota(jnp.int32, (ring.keys, head_dim), 0)
            values[...] = jnp.where(key < end, values[...], jnp.zeros((), values.dtype))  # 0 x NaN is NaN

        scratch["weights"][...] = weights.astype(ring.dtype)
        acc = plgpu.mma(acc, plgpu.load(scratch["weights"]), plgpu.load(values))
        return acc, new_peak, total

    nothing = (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), softmax.FLOOR, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    acc, peak, total = stream.fold(step, nothing)
    acc = acc / lax.broadcast_in_dim(jnp.where(total > 0, total, 1.0), acc.shape, [0])
    compat.store(out.at[index, head], acc.astype(out.dtype))
    compat.store(lse.at[index, head], jnp.where(total > 0, (peak + jnp.log2(total)) / softmax.LOG2E, -jnp.inf))
