"""What the kernel is told to do: a list of work items, made of the batch's lengths by XLA.

An item is what one sequence has in one tile of `block_q` consecutive tokens of the batch; a tile that several
sequences share has several items, one after the other.
"""

from typing import Final, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.ragged import owner

NUM_FIELDS: Final = 7


class Item(NamedTuple):
    """One work item; each field a scalar in the kernel, an array over all items outside.

    Attributes:
      seq: row of the block table.
      tile: which tile of tokens.
      position: of the tile's first token, were it the sequence's; may be negative.
      first_row: first token of the tile that is the sequence's.
      end_row: past the last one.
      first_page: first logical page that any of them sees.
      end_page: past the last one.
    """

    seq: Array
    tile: Array
    position: Array
    first_row: Array
    end_row: Array
    first_page: Array
    end_page: Array


def max_items(num_tokens: int, num_seqs: int, block_q: int, max_query_len: int) -> int:
    """The most items that a batch of these sizes can have, at least 1."""
    tiles = -(-num_tokens // block_q)
    return max(1, min(tiles + min(num_seqs, num_tokens) - 1, num_tokens, num_seqs * max_query_len))


def items(
    seq_lens: Array, cu_query_lens: Array, window: Array, *, block_q: int, page_size: int, count: int
) -> tuple[Item, Array]:
    """(items, number of real ones); those past the real ones repeat the last, so that they move no tile."""
    start, end = cu_query_lens[:-1], cu_query_lens[1:]
    first_tile = start // block_q
    tiles = jnp.where((end > start) & (seq_lens > 0), (end - 1) // block_q - first_tile + 1, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.clip(jnp.arange(count, dtype=jnp.int32), 0, jnp.maximum(ends[-1] - 1, 0))
    seq = owner(ends, item)

    start, end, cached = start[seq], end[seq], seq_lens[seq]
    tile = first_tile[seq] + item - (ends - tiles)[seq]
    first_token = tile * block_q
    position = cached - end + first_token
    first_row = jnp.maximum(start - first_token, 0)
    end_row = jnp.minimum(end - first_token, block_q)
    first_page = jnp.maximum(jnp.maximum(position + first_row, 0) - window + 1, 0) // page_size
    end_page = jnp.maximum(-(-(position + end_row) // page_size), first_page + 1)
    tile = jnp.where(ends[-1] > 0, tile, 0)
    return Item(seq, tile, position, first_row, end_row, first_page, end_page), ends[-1]
