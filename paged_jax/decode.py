"""Decode steps that follow one another in one program, without the host between them.

Every row feeds its own token back until one of its end tokens or its limit. The pages of all these tokens were taken
before, so that the block tables stand still; the pages are a carry of the loop and are updated in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int32

from paged_jax import batch
from paged_jax.batch import Batch

MAX_END_IDS: Final = 8
"""End tokens of a row that the loop looks for."""


class DecodeRows(NamedTuple):
    """Sequences that have one token to compute, padded to a static number of rows.

    Attributes:
      block_tables: int32 [rows, pages_per_seq], the pages of the tokens to come included.
      cached_lens: int32 [rows], the position of the first token to compute.
      stored_lens: int32 [rows], tokens whose keys and values are in the pages; one more than `cached_lens` where the
        first token is computed again for its logits, and not written.
      limits: int32 [rows], steps at most; 0 for padding.
      end_ids: int32 [rows, MAX_END_IDS], tokens that end a row, padded with -1.
      logit_rows: int32 [rows], whose logits give a row's token: its own but for children that fork after the one step.
      stops_together: bool [], whether all rows stop after the step in which the first one ends.
    """

    block_tables: Array
    cached_lens: Array
    stored_lens: Array
    limits: Array
    end_ids: Array
    logit_rows: Array
    stops_together: Array


class _Carry(NamedTuple):
    step: Array
    token_ids: Array
    lens: Array
    active: Array
    context: Any
    outputs: Any
    kv: Any


def pack(
    block_tables: Int32[np.ndarray, "n pages_per_seq"],
    cached_lens: Int32[np.ndarray, " n"],
    stored_lens: Int32[np.ndarray, " n"],
    limits: Int32[np.ndarray, " n"],
    end_ids: Sequence[Sequence[int]],
    logit_rows: Int32[np.ndarray, " rows"],
    *,
    stops_together: bool,
) -> DecodeRows:
    """Host arrays of as many rows as `logit_rows` has, from those of n sequences; see `DecodeRows`.

    Args:
      block_tables, cached_lens, stored_lens, limits: of the n sequences.
      end_ids: of the first sequences, at most MAX_END_IDS each; none for the others.
      logit_rows: of all rows.
      stops_together: see `DecodeRows`.
    """
    rows = logit_rows.shape[0]
    ends = np.full((rows, MAX_END_IDS), -1, np.int32)
    for row, ids in enumerate(end_ids):
        if ids:
            ends[row, : len(ids)] = ids
    lens = np.zeros((3, rows), np.int32)
    for padded, given in zip(lens, (cached_lens, stored_lens, limits), strict=True):
        padded[: given.size] = given
    tables = np.zeros((rows, block_tables.shape[1]), np.int32)
    tables[: len(block_tables)] = block_tables
    columns: list[Any] = [tables, *lens, ends, logit_rows, np.bool_(stops_together)]
    return DecodeRows(*columns)


def no_rows(num_rows: int, pages_per_seq: int) -> DecodeRows:
    """Padding alone: nothing is computed."""
    none, null_pages = np.zeros(0, np.int32), np.zeros((0, pages_per_seq), np.int32)
    return pack(null_pages, none, none, none, [], np.zeros(num_rows, np.int32), stops_together=False)


def loop(
    step: Callable[..., tuple[Any, Any]],
    params: Any,
    token_ids: Int32[Array, " rows"],
    rows: DecodeRows,
    kv: Any,
    extras: Any,
    *,
    page_size: int,
    max_steps: int,
    implementation: str | None,
) -> tuple[Any, Any]:
    """Up to `max_steps` decode steps; it ends as soon as no row goes on.

    Args:
      step: `(params, token_ids, batch, kv, extras) -> (output, kv)`, whose `output.tokens` are the rows' next tokens;
        traced once.
      params: the model's parameters.
      token_ids: each row's first token to compute.
      rows: the sequences.
      kv: the pages.
      extras: see `steps.Extras`; its context, if there is one, grows with the tokens.
      page_size: tokens a page.
      max_steps: static; no limit is above it.
      implementation: of the attention.

    Returns:
      (outputs, kv): the steps' outputs along a new first axis of `max_steps`. What belongs to a step that was not
      computed, or to a row that had ended, is meaningless.
    """
    step = jax.jit(step, inline=True)  # remembers its trace

    def batch_of(lens: Array, active: Array) -> Batch:
        made = batch.decode(rows.block_tables, lens, active.astype(jnp.int32), page_size=page_size)
        slots = jnp.where(lens < rows.stored_lens, -1, made.slot_mapping)
        return replace(made, slot_mapping=slots, logit_rows=rows.logit_rows, implementation=implementation)

    def body(carry: _Carry) -> _Carry:
        extras_now = extras._replace(context=carry.context)
        output, kv = step(params, carry.token_ids, batch_of(carry.lens, carry.active), carry.kv, extras_now)
        ended = _ends(output.tokens, rows.end_ids) | (carry.step + 1 >= rows.limits)
        all_stop = rows.stops_together & (carry.active & ended).any()
        lens = carry.lens + carry.active.astype(jnp.int32)
        context = carry.context
        if context is not None:
            place = jnp.where(carry.active, lens, context.shape[1])
            context = context.at[jnp.arange(lens.shape[0], dtype=jnp.int32), place].set(output.tokens, mode="drop")
        return _Carry(
            carry.step + 1,
            output.tokens,
            lens,
            carry.active & ~ended & ~all_stop,
            context,
            jax.tree.map(partial(_put, carry.step), carry.outputs, output),
            kv,
        )

    active = rows.limits > 0
    shapes, _ = jax.eval_shape(step, params, token_ids, batch_of(rows.cached_lens, active), kv, extras)
    outputs = jax.tree.map(lambda shape: jnp.zeros((max_steps, *shape.shape), shape.dtype), shapes)
    start = _Carry(jnp.int32(0), token_ids, rows.cached_lens, active, extras.context, outputs, kv)
    end = lax.while_loop(lambda carry: carry.active.any(), body, start)
    return end.outputs, end.kv


def _ends(tokens: Int32[Array, " rows"], end_ids: Int32[Array, "rows n"]) -> Bool[Array, " rows"]:
    return (tokens[:, None] == end_ids).any(axis=1)


def _put(step: Int32[Array, ""], outputs: Array, output: Array) -> Array:
    return lax.dynamic_update_index_in_dim(outputs, output, step, 0)
