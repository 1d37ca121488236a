"""How the scales of a quantised pool reach a kernel.

TMA writes shared memory at multiples of 128 bytes (CUDA C++ Programming Guide, "Tensor Memory Access"), 32 scales:
pages of 32 tokens or more bring theirs with them. For smaller pages, and GPUs without TMA, XLA gathers the scales by
key before the kernel. That writes as many scales as the table has room for.
"""

from typing import Final

import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic_gpu.target import Target

_ALIGNED: Final = 32  # scales
_MOST_KEYS: Final = 128  # of any ring's tile


def lie_where_copies_reach(target: Target, page_size: int) -> bool:
    """Whether the kernel copies the scales out of the pool itself."""
    return target.has_tma and page_size % _ALIGNED == 0


def by_key(kv_scales: Array, block_tables: Array, row_offset: Array) -> Array:
    """float32 [num_seqs, num_kv_heads, 2, positions], keys' scales before values', from kv_scales of the pool.

    There are positions for the whole table and for a tile that starts at its end. Those of nobody hold anything.
    """
    num_rows, num_scales, page_size = kv_scales.shape
    num_seqs, pages_per_seq = block_tables.shape
    gathered = kv_scales[jnp.clip(block_tables + row_offset, 0, num_rows - 1)].swapaxes(1, 2)
    gathered = gathered.reshape(num_seqs, num_scales // 2, 2, pages_per_seq * page_size)
    return jnp.pad(gathered, ((0, 0), (0, 0), (0, 0), (0, _MOST_KEYS)))
