"""What one step of a model needs to know about its sequences."""

from dataclasses import dataclass, field
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from pallas_kernels.ragged import owner


@no_type_check  # jax also builds instances of shapes, host arrays and placeholders
@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Batch:
    """A ragged batch: tokens of several sequences, packed, with the pages their attention reads and writes.

    All arrays are int32. A dataclass and not a NamedTuple because two fields are static: what they change is the
    compiled program.

    Attributes:
      block_tables: [num_seqs, pages_per_seq] page ids, padded with the null page.
      seq_lens: [num_seqs] tokens in the cache once this step is written; 0 for sequences without a query.
      cu_query_lens: [num_seqs + 1] cumulative query lengths.
      positions: [num_tokens] position of each token in its sequence; 0 for padding.
      slot_mapping: [num_tokens] slot that each token's key and value go to; -1 for padding and for tokens whose
        key and value are there already.
      logit_rows: tokens whose logits are wanted; as made by the block tables [num_seqs], the last token of each
        sequence (0 where a sequence has none). A caller may put fewer rows there.
      max_query_len: static upper bound of the query lengths.
      implementation: static; the attention implementation for the whole model, None to choose by platform.
    """

    block_tables: Array
    seq_lens: Array
    cu_query_lens: Array
    positions: Array
    slot_mapping: Array
    logit_rows: Array | np.ndarray
    max_query_len: int = field(metadata={"static": True})
    implementation: str | None = field(default=None, metadata={"static": True})


def ragged(
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    cached_lens: Int32[Array, " num_seqs"],
    counts: Int32[Array, " num_seqs"],
    *,
    page_size: int,
    num_tokens: int,
    max_query_len: int,
    rereads: Int32[Array, " num_seqs"] | None = None,
) -> Batch:
    """The batch that appends `counts[s]` tokens to each sequence, packed in the order of the rows.

    Args:
      block_tables: page ids, those of the new tokens included.
      cached_lens: tokens of each sequence before this step.
      counts: new tokens of each sequence.
      page_size: tokens a page.
      num_tokens: static length of the packed tokens; those past the sum of `counts` and `rereads` are padding.
      max_query_len: static upper bound of `counts + rereads`.
      rereads: cached tokens at the end of each sequence that are computed again, before the new ones, and not
        written; None for none.
    """
    rereads = jnp.zeros_like(counts) if rereads is None else rereads
    query_lens = counts + rereads
    cu_query_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_lens, dtype=jnp.int32)])
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = owner(cu_query_lens[1:], token)
    is_token = token < cu_query_lens[-1]
    positions = jnp.where(is_token, (cached_lens - rereads)[seq] + token - cu_query_lens[seq], 0)
    slots = block_tables[seq, positions // page_size] * page_size + positions % page_size
    return Batch(
        block_tables=block_tables,
        seq_lens=jnp.where(query_lens > 0, cached_lens + counts, 0),
        cu_query_lens=cu_query_lens,
        positions=positions,
        slot_mapping=jnp.where(is_token & (positions >= cached_lens[seq]), slots, -1),
        logit_rows=jnp.where(query_lens > 0, cu_query_lens[1:] - 1, 0),
        max_query_len=max_query_len,
    )


def decode(
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    cached_lens: Int32[Array, " num_seqs"],
    counts: Int32[Array, " num_seqs"],
    *,
    page_size: int,
) -> Batch:
    """The batch that appends at most one token to each sequence: token i belongs to row i.

    Rows with count 0 keep their token's place: it has seq_len 0 and drops its slot.
    """
    num_seqs = counts.shape[0]
    row = jnp.arange(num_seqs, dtype=jnp.int32)
    active = counts > 0
    positions = jnp.where(active, cached_lens, 0)
    slots = block_tables[row, positions // page_size] * page_size + positions % page_size
    return Batch(
        block_tables=block_tables,
        seq_lens=jnp.where(active, cached_lens + 1, 0),
        cu_query_lens=jnp.arange(num_seqs + 1, dtype=jnp.int32),
        positions=positions,
        slot_mapping=jnp.where(active, slots, -1),
        logit_rows=row,
        max_query_len=1,
    )
