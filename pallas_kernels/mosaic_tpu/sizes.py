"""Static sizes of one launch: tiles, ring and scratch, from the bytes they take."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jax.typing import DTypeLike

LANES: Final = 128
NARROW: Final = 16
"""Tokens of the window that an item of few queries computes: one tile of packed bfloat16 rows."""

_BLOCK_KEYS: Final = 256  # keys of a block, at most
_BLOCK_BYTES: Final = 4 * 2**20  # of a block, at most; halves the keys
_RING_BYTES: Final = 4 * 2**20  # the ring is as deep as these hold, within the bounds
_RING_SLOTS: Final = (2, 8)
_CHUNK_ROWS: Final = 256  # rows whose softmax is computed at once: as many heads as fit


@dataclass(frozen=True)
class Sizes:
    """What the kernel is compiled for.

    Attributes:
      num_kv_heads: KV heads.
      group: query heads of one KV head.
      head_dim: width of a head in the pool.
      page_size: tokens a page.
      block_q: tokens of a tile; a power of two. 1 is decode.
      pages_per_block: pages of one block of keys, copied and computed on together.
      slots: blocks in the ring; all but one are in flight.
      vmem_bytes: what all of it takes, estimated from above.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    block_q: int
    pages_per_block: int
    slots: int
    vmem_bytes: int = 0

    @property
    def lanes(self) -> int:
        """Of a token in the pool."""
        return self.num_kv_heads * 2 * self.head_dim

    @property
    def width(self) -> int:
        """Lanes of q and of the output in the kernel: at head_dim 64, key and value of a head share 128 lanes."""
        return max(self.head_dim, LANES)

    @property
    def rows(self) -> int:
        """Query rows of one KV head in a tile, the group's tokens one head after the other; padded to 8."""
        return round_up(self.group * self.block_q, 8)

    @property
    def block_keys(self) -> int:
        return self.pages_per_block * self.page_size

    @property
    def lse_lanes(self) -> int:
        return round_up(self.num_kv_heads, LANES)

    def heads_at_once(self, rows: int) -> int:
        """KV heads whose softmax is computed together when each has `rows` rows; divides num_kv_heads."""
        most = max(1, _CHUNK_ROWS // rows)
        return max(n for n in range(1, self.num_kv_heads + 1) if n <= most and self.num_kv_heads % n == 0)


def choose(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_query_len: int,
    query_dtype: DTypeLike,
    pool_dtype: DTypeLike,
    budget: int,
) -> Sizes | None:
    """The sizes with the largest tile that fits `budget` bytes of VMEM; None if the smallest does not."""
    group = num_heads // num_kv_heads
    row_bytes = num_kv_heads * 2 * head_dim * np.dtype(pool_dtype).itemsize
    keys = _BLOCK_KEYS
    while keys > LANES and keys * row_bytes > _BLOCK_BYTES:
        keys //= 2
    pages_per_block = keys // page_size
    slots = min(max(_RING_BYTES // (keys * row_bytes), _RING_SLOTS[0]), _RING_SLOTS[1])
    # A tile reads all its keys once: below about 250 rows of bfloat16 that takes longer than computing (v5e).
    block_q = 1 if max_query_len == 1 else min(_power_of_two(max_query_len), 128 if group >= 4 else 256)
    block_q = block_q if block_q == 1 else max(block_q, NARROW)
    while True:
        sizes = Sizes(num_kv_heads, group, head_dim, page_size, block_q, pages_per_block, slots)
        needed = _vmem_bytes(sizes, np.dtype(query_dtype).itemsize, np.dtype(pool_dtype).itemsize)
        if needed <= budget:
            return Sizes(num_kv_heads, group, head_dim, page_size, block_q, pages_per_block, slots, needed)
        if block_q <= NARROW:
            return None
        block_q //= 2


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _vmem_bytes(sizes: Sizes, query_bytes: int, pool_bytes: int) -> int:
    rows = sizes.num_kv_heads * sizes.rows
    queries_and_output = 2 * 2 * rows * sizes.width * query_bytes  # double-buffered by the pipeline
    lse = 2 * sizes.rows * sizes.lse_lanes * 4
    ring = sizes.slots * sizes.block_keys * sizes.lanes * pool_bytes
    if pool_bytes == 1:
        num_scales = round_up(2 * sizes.num_kv_heads, 8)
        padded = round_up(sizes.page_size, LANES)
        ring += num_scales * (sizes.slots * sizes.pages_per_block * padded + sizes.block_keys) * 4
    accumulators = rows * (sizes.width + 2 * LANES) * 4
    at_once = sizes.heads_at_once(sizes.rows) * sizes.rows
    # Logits, mask, weights and their halves, products; and a head's keys and values, split into bfloat16 parts.
    values = at_once * (6 * sizes.block_keys + 4 * sizes.width) * 4 + 8 * sizes.block_keys * sizes.width * 4
    return queries_and_output + lse + ring + accumulators + values
