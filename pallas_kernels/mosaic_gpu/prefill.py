"""Prefill of ragged chunks: queries are cut into tiles, a kernel attends each (tile, KV head), XLA puts them back.

The query heads of a KV head are packed with the queries, so that keys and values are read once for all of them: the
rows of a tile are `rows // group` queries of one sequence, each with all heads of the group. Tiles are padded per
sequence, since a kernel reads them at multiples of 8 rows; the copies cost twice the bytes of q, and of the output.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic_gpu import prefill_mma, prefill_wgmma, target
from pallas_kernels.ragged import owner


def prefill(
    q: Array,
    kv_pages: Array,
    kv_scales: Array | None,
    block_tables: Array,
    seq_lens: Array,
    cu_query_lens: Array,
    query_lens: Array,
    row_offset: Array,
    scale: Array,
    window: Array,
    *,
    num_kv_heads: int,
    logit_soft_cap: float | None,
) -> tuple[Array, Array]:
    """Attention of the sequences with query_lens > 0; the rows of all others hold anything. Returns (out, lse)."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    gpu = target.current()
    multiplies_memory = gpu.has_wgmma and head_dim <= prefill_wgmma.MAX_HEAD_DIM and kv_scales is None
    kernel = prefill_wgmma if multiplies_memory else prefill_mma
    tile = kernel.ROWS // group  # queries of a tile
    padding = kernel.ROWS - tile * group
    num_tiles = num_tokens // tile + min(num_seqs, num_tokens // 2)  # sequences here have at least 2 queries

    tiles_of = -(-query_lens // tile)
    ends = jnp.cumsum(tiles_of, dtype=jnp.int32)
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = owner(ends, index)
    skipped = (index - (ends - tiles_of)[seq]) * tile
    count = jnp.where(index < ends[-1], jnp.minimum(query_lens[seq] - skipped, tile), 0)
    first_query = jnp.where(count > 0, (seq_lens - query_lens)[seq] + skipped, 0)  # 0, so that no key is seen
    tiles = jnp.stack([seq, first_query, count], axis=1)

    token = (cu_query_lens[seq] + skipped)[:, None] + jnp.arange(tile, dtype=jnp.int32)
    packed = q[jnp.clip(token, 0, num_tokens - 1)].reshape(num_tiles, tile, num_kv_heads, group, head_dim)
    packed = packed.swapaxes(1, 2).reshape(num_tiles, num_kv_heads, tile * group, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padding), (0, 0)))

    out, lse = kernel.attend_tiles(
        packed, tiles, kv_pages, kv_scales, block_tables, row_offset, scale, window,
        gpu=gpu, group=group, logit_soft_cap=logit_soft_cap,
    )  # fmt: skip

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = owner(cu_query_lens[1:], token)
    within = token - cu_query_lens[seq]
    index = jnp.clip((ends - tiles_of)[seq] + within // tile, 0, num_tiles - 1)
    out = out[:, :, : tile * group].reshape(num_tiles, num_kv_heads, tile, group, head_dim)
    lse = lse[:, :, : tile * group].reshape(num_tiles, num_kv_heads, tile, group)
    row = within % tile
    return out[index, :, row].reshape(q.shape), lse[index, :, row].reshape(num_tokens, num_heads)
