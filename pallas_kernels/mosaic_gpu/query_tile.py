"""The tile of queries that a block of a prefill kernel attends, and the keys that it sees."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu.ring import Ring, Stream


class QueryTile(NamedTuple):
    """Scalars of a kernel.

    Attributes:
      index: of the tile.
      head: the KV head.
      first_query: position of the first query.
      end: one past the last position that the tile sees.
      stream: the keys; no tiles of them if there are no queries.
    """

    index: Any
    head: Any
    first_query: Any
    end: Any
    stream: Stream


def query_tile(
    ring: Ring, scratch: Any, tiles: Any, kv_pages: Any, kv_scales: Any, block_tables: Any, row_offset: Any, window: Any
) -> QueryTile:
    """This block's, from the refs of the kernel's operands; tiles hold (sequence, first position, queries)."""
    head = lax.axis_index("head")
    index = tiles.shape[0] - 1 - lax.axis_index("tile")  # a sequence's last tiles see most: they go first
    seq, first_query, num_queries = (tiles[index, i] for i in range(3))
    end = first_query + num_queries
    first_key = jnp.maximum(first_query - window[0] + 1, 0) // ring.copy_keys * ring.copy_keys
    count = (end - first_key + ring.keys - 1) // ring.keys
    stream = Stream(
        ring, scratch, kv_pages, kv_scales, block_tables, row_offset[0], seq, head, first_key, count,
        last_page=lax.div(end - 1, jnp.int32(ring.page_size)),  # towards 0: 0 if there are no queries
    )  # fmt: skip
    return QueryTile(index, head, first_query, end, stream)
