"""Decode: one query a sequence; a block of one warpgroup for each (sequence, split, KV head).

A block streams its split of the sequence's keys through a ring of shared-memory stages and keeps an online softmax in
float32 (Milakov and Gimelshein 2018, algorithm 3); XLA combines the splits. The products are transposed, S^T = K Q^T
and O^T = V^T P^T, so that keys and then head_dim lie on the tensor core's long axis and the query group, padded to a
multiple of 8, on its short one.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu import compat, softmax, target
from pallas_kernels.mosaic_gpu.ring import Ring, Stream, Tile, ring_for_two_blocks

_BLOCKS_PER_SM: Final = 6  # two at once, so three waves even out unequal lengths
_TILE_BYTES: Final = 32 * 1024  # of keys and values in 16 bits
_MIN_TILE_KEYS: Final = 64  # rows of a warpgroup's product
_MIN_SPLIT_KEYS: Final = 256  # fewer keys do not pay for a split


def num_splits(num_sms: int, num_blocks: int, max_keys: int) -> int:
    """Splits of a sequence: enough blocks to fill the GPU, none shorter than `_MIN_SPLIT_KEYS` at full length."""
    return max(1, min(-(-num_sms * _BLOCKS_PER_SM // num_blocks), -(-max_keys // _MIN_SPLIT_KEYS)))


def decode(
    q: Array,
    kv_pages: Array,
    kv_scales: Array | None,
    block_tables: Array,
    lengths: Array,
    row_offset: Array,
    scale: Array,
    window: Array,
    *,
    num_kv_heads: int,
    logit_soft_cap: float | None,
) -> tuple[Array, Array]:
    """Attention of one query a sequence, the last position's: q[num_seqs, num_heads, head_dim].

    Sequences of length 0 give zeros (lse -inf), whatever their query and table hold. Returns (out float32, lse).
    """
    num_seqs, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    gpu = target.current()
    keys = max(_MIN_TILE_KEYS, _TILE_BYTES // (2 * 2 * head_dim))
    ring = ring_for_two_blocks(gpu, keys, q.dtype, kv_pages, head_dim)
    columns = -(-group // 8) * 8
    splits = num_splits(gpu.num_sms, num_seqs * num_kv_heads, block_tables.shape[1] * ring.page_size)
    q = q.reshape(num_seqs, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, columns - group), (0, 0)))

    shape = (num_seqs, splits, num_kv_heads)
    partials = [(*shape, head_dim, columns), (*shape, columns), (*shape, columns)]

    def decode(*refs: Any, **scratch: Any) -> None:  # the name is the kernel's
        _body(ring, splits, logit_soft_cap, *refs, **scratch)

    acc, peak, total = plgpu.kernel(
        decode,
        out_type=[jax.ShapeDtypeStruct(partial, jnp.float32) for partial in partials],
        scratch_types={**ring.scratch(), "weights": plgpu.SMEM((ring.keys, columns), q.dtype)},
        grid=shape,
        grid_names=("seq", "split", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, kv_pages, kv_scales, block_tables, lengths, row_offset.reshape(1), scale.reshape(1), window.reshape(1))

    out, lse = softmax.combine(acc / ring.value_unit, peak[:, :, :, None], total[:, :, :, None], axis=1)
    out = out.swapaxes(2, 3)[:, :, :group].reshape(q_shape := (num_seqs, num_heads, head_dim))
    return out, lse[:, :, 0, :group].reshape(q_shape[:2])


def _body(
    ring: Ring,
    splits: int,
    soft_cap: float | None,
    q: Any,
    kv_pages: Any,
    kv_scales: Any,
    block_tables: Any,
    lengths: Any,
    row_offset: Any,
    scale: Any,
    window: Any,
    acc_out: Any,
    peak_out: Any,
    total_out: Any,
    **scratch: Any,
) -> None:
    seq, split, head = (lax.axis_index(name) for name in ("seq", "split", "head"))
    columns, head_dim = q.shape[-2:]
    length = lengths[seq]
    to_log2 = softmax.log2_logits(scale[0], soft_cap)
    first_visible = jnp.maximum(length - window[0], 0)
    # The split's tiles, counted from the first copy that holds a visible key.
    first_key = first_visible // ring.copy_keys * ring.copy_keys
    tiles = (length - first_key + ring.keys - 1) // ring.keys
    tiles_per_split = jnp.maximum((tiles + splits - 1) // splits, _MIN_SPLIT_KEYS // ring.keys)
    skipped = jnp.minimum(split * tiles_per_split, tiles)
    count = jnp.minimum(tiles_per_split, tiles - skipped)
    first_key = first_key + skipped * ring.keys

    stream = Stream(
        ring, scratch, kv_pages, kv_scales, block_tables, row_offset[0], seq, head, first_key, count,
        last_page=jnp.maximum(length - 1, 0) // ring.page_size,
    )  # fmt: skip
    queries = plgpu.load(q.at[seq, head].T, optimized=False)

    def step(tile: Tile, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        acc, peak, total = carry
        position = tile.first_key + lax.broadcasted_iota(jnp.int32, (ring.keys, columns), 0)
        visible = (position >= first_visible) & (position < length)
        keys = plgpu.load(tile.kv.at[:, pl.ds(0, head_dim)])
        logits = plgpu.mma(jnp.zeros((ring.keys, columns), jnp.float32), keys, queries)
        logits = jnp.where(visible, to_log2(tile.scale_logits(logits, axis=0)), softmax.FLOOR)
        new_peak = jnp.maximum(peak, logits.max(axis=0))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [1]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(axis=0)

        scratch["weights"][...] = tile.scale_weights(weights, visible, axis=0).astype(ring.dtype)
        values = plgpu.load(tile.kv.at[:, pl.ds(head_dim, head_dim)].T)
        position = tile.first_key + lax.broadcasted_iota(jnp.int32, (head_dim, ring.keys), 1)
        values = jnp.where(position < length, values, jnp.zeros_like(values))  # 0 x NaN is NaN
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [1])
        return plgpu.mma(acc, values, plgpu.load(scratch["weights"])), new_peak, total

    nothing = (
        jnp.zeros((head_dim, columns), jnp.float32),
        jnp.full((columns,), softmax.FLOOR, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
    )
    acc, peak, total = stream.fold(step, nothing)
    compat.store(acc_out.at[seq, split, head], acc)
    compat.store(peak_out.at[seq, split, head], peak)
    compat.store(total_out.at[seq, split, head], total)
