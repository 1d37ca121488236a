"""The device's side of an engine: page pool, block tables and pages, moved by compiled programs as a plan says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Int32

from paged_jax import block_tables, decode, page_pool
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables, PageCopies
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.decode import DecodeRows
from paged_jax.errors import MissingBackendError
from paged_jax.layout import KVLayout
from paged_jax.page_pool import PagePool
from paged_jax.scheduler import StepPlan
from paged_jax.sequence import SequenceState
from paged_jax.steps import Extras, PageUpdates, StepOutput, Steps

MakeExtras = Callable[[Sequence[tuple[SequenceState, int]], int, int], Extras]
"""(sequences and tokens to compute of each, as rows of the step; packed tokens; rows of logits) -> extras."""


class Runner:
    """Holds what is cached and computes steps.

    The allocator's state (block tables and page pool) lives on the host's CPU device, the pages beside the parameters.
    After a failed step nothing is cached any more: the pages were donated to it.

    Args:
      steps: the compiled programs.
      params: the model's parameters; another tree of the same shapes may take their place.
      layout: geometry of the pages.
      config: limits and choices.

    Raises:
      MissingBackendError: JAX was started without its CPU backend.
    """

    def __init__(self, steps: Steps, params: Any, layout: KVLayout, config: EngineConfig) -> None:
        self.params = params
        self.steps = steps
        self._layout = layout
        self._config = config
        (self.device,) = jax.tree.leaves(params)[0].devices()
        self._host = _cpu_device()
        self.reset()

    @property
    def num_free(self) -> int:
        """Free pages of the pool."""
        return int(self._pool.num_free)

    @property
    def page_ids(self) -> np.ndarray:
        """The block tables: int32 [max_seqs, pages_per_seq], a view."""
        return np.asarray(self._tables.page_ids)

    @property
    def seq_lens(self) -> np.ndarray:
        """Tokens of each row: int32 [max_seqs], a view."""
        return np.asarray(self._tables.seq_lens)

    def reset(self) -> None:
        """Forgets everything that is cached."""
        pages_per_seq = self._layout.pages_for(self._config.max_model_len)
        with jax.default_device(self._host):
            self._tables = block_tables.create(self._config.max_seqs, pages_per_seq)
            self._pool = page_pool.create(self._layout.num_pages)
        with jax.default_device(self.device):
            self._kv = KVPages.create(self._layout)

    def run(self, plan: StepPlan, make_extras: MakeExtras) -> StepOutput:
        """Allocates, computes, and gives the next token of every row on the host, an axis of steps before the rows.

        Rows are the plan's sequences in order, then the children that fork from them.
        """
        counts = [count for _, count in plan.counts]
        logit_rows = (np.cumsum(counts) - 1).tolist()
        rows = plan.counts
        if plan.forked:
            place = {sequence: row for row, (sequence, _) in enumerate(rows)}
            pairs = [(parent, child) for parent, children in plan.forked for child in children]
            logit_rows += [logit_rows[place[parent]] for parent, _ in pairs]
            rows = rows + [(child, 0) for _, child in pairs]

        is_decode = max(counts) == 1
        sizes = self._config.decode_sizes if is_decode else self._config.prefill_sizes
        size = next(size for size in sizes if size >= max(plan.num_tokens, len(rows)))
        token_ids = np.zeros(size, np.int32)
        token_ids[: plan.num_tokens] = [
            token for seq, count in plan.counts for token in seq.tokens[seq.num_cached : seq.num_cached + count]
        ]

        self._adopt([sequence for sequence in plan.admitted if sequence.named])
        wanted = np.zeros(min(size, self._config.max_seqs), np.int32)
        wanted[: len(logit_rows)] = logit_rows
        work = self._reserve(plan, wanted) if is_decode else self._append(plan, counts, size, wanted)
        return self._compute(token_ids, work, make_extras(rows, size, len(wanted)))

    def compile(self, num_tokens: int, extras: Extras, *, is_decode: bool) -> None:
        """Compiles the programs of steps of this shape, by a step that computes nothing of use."""
        none = np.zeros(self._config.max_seqs, np.int32)
        work: Batch | DecodeRows
        if is_decode:
            self.steps.reserve(self._tables, self._pool, none, self._no_updates(self._most_decoded))
            work = decode.no_rows(num_tokens, self.page_ids.shape[1])
        else:
            updates = self._no_updates(self._config.max_tokens_per_step)
            _, _, batch, _, _ = self._steps_append(none, none, updates, num_tokens)
            work = replace(batch, logit_rows=none[:num_tokens])
        self._compute(np.zeros(num_tokens, np.int32), work, extras)

    def compile_metadata(self) -> None:
        """Compiles the programs that move pages beside steps, by calls that move nothing."""
        none = np.full(self._config.max_seqs, -1, np.int32)
        self.release([])
        self.release_before({})
        self.release_pages([])
        self._tables, self._pool = self.steps.fork(self._tables, self._pool, none, none)
        null_pages, no_row = np.zeros(self._tables.page_ids.shape[1], np.int32), np.int32(self._config.max_seqs)
        self._tables, self._pool = self.steps.adopt(self._tables, self._pool, no_row, null_pages, np.int32(0))
        copies = block_tables.PageCopies(*jax.device_put((none, none, np.int32(0)), self.device))
        self._kv = self.steps.copy_pages(self._kv, copies)

    def settle(self, published: Sequence[tuple[int, int]], lens: Mapping[int, int]) -> None:
        """Takes the index's references on pages, (row, logical page) each, then cuts rows to a length each and gives
        back what lies behind."""
        updates = self._no_updates(self._most_decoded)
        if published:
            n = len(published)
            updates.published_rows[:n], updates.published_pages[:n] = zip(*published, strict=True)
        all_lens = np.full(self._config.max_seqs, np.iinfo(np.int32).max, np.int32)
        all_lens[list(lens)] = list(lens.values())
        self._tables, self._pool = self.steps.settle(self._tables, self._pool, all_lens, updates)

    def release(self, rows: Sequence[int]) -> None:
        """Gives back the pages of rows."""
        self.settle([], dict.fromkeys(rows, 0))

    def release_row(self, row: int) -> int:
        """Gives back the pages of a row and returns how many are free then."""
        self.release([row])
        return self.num_free

    def release_before(self, first_pages: Mapping[int, int]) -> None:
        """Gives back the pages of rows before a logical page."""
        first = np.zeros(self._config.max_seqs, np.int32)
        first[list(first_pages)] = list(first_pages.values())
        self._tables, self._pool = self.steps.release_before(self._tables, self._pool, first)

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes rows second names for others: (row, new row) each."""
        src, dst = np.full((2, self._config.max_seqs), -1, np.int32)
        src[: len(pairs)], dst[: len(pairs)] = zip(*pairs, strict=True)
        self._tables, self._pool = self.steps.fork(self._tables, self._pool, src, dst)

    def release_pages(self, page_ids: Sequence[int]) -> None:
        """Gives back the index's references."""
        mask = np.zeros(self._layout.num_pages, bool)
        mask[list(page_ids)] = True
        self._pool = self.steps.release_pages(self._pool, np.where(mask, np.arange(mask.size, dtype=np.int32), 0))

    def _adopt(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            page_ids = np.zeros(self._tables.page_ids.shape[1], np.int32)
            page_ids[: len(sequence.named)] = [page.page_id for page in sequence.named]
            length = np.int32(len(sequence.named) * self._layout.page_size)
            row = np.int32(sequence.placed_row)
            self._tables, self._pool = self.steps.adopt(self._tables, self._pool, row, page_ids, length)

    def _append(
        self, plan: StepPlan, query_lens: list[int], num_tokens: int, logit_rows: Int32[np.ndarray, " rows"]
    ) -> Batch:
        counts, rereads = np.zeros((2, self._config.max_seqs), np.int32)
        rows = [sequence.placed_row for sequence, _ in plan.counts]
        rereads[rows] = [sequence.rereads for sequence, _ in plan.counts]
        counts[rows] = query_lens
        counts -= rereads
        updates = self._updates(plan, self._config.max_tokens_per_step)
        tables, pool, batch, copies, ok = self._steps_append(counts, rereads, updates, num_tokens)
        self._take(tables, pool, copies, ok)
        return replace(batch, logit_rows=logit_rows)

    def _reserve(self, plan: StepPlan, logit_rows: Int32[np.ndarray, " rows"]) -> DecodeRows:
        sequences = [sequence for sequence, _ in plan.counts]
        rows = [sequence.placed_row for sequence in sequences]
        cached_lens = np.array([sequence.num_cached for sequence in sequences], np.int32)
        rereads = np.array([sequence.rereads for sequence in sequences], np.int32)
        limits = np.ones_like(cached_lens)
        end_ids: list[tuple[int, ...]] = []
        if plan.num_steps > 1:
            limits[:] = [sequence.steps_left(plan.num_steps) for sequence in sequences]
            end_ids = [sequence.end_ids or () for sequence in sequences]
        counts = np.zeros(self._config.max_seqs, np.int32)
        counts[rows] = limits - rereads
        self._take(*self.steps.reserve(self._tables, self._pool, counts, self._updates(plan, self._most_decoded)))
        return decode.pack(
            self.page_ids[rows],
            cached_lens,
            cached_lens + rereads,
            limits,
            end_ids,
            logit_rows,
            stops_together=plan.stops_together,
        )

    def _take(self, tables: BlockTables, pool: PagePool, copies: PageCopies, ok: Array) -> None:
        """Makes what the allocator gave the state. It is read before the model is dispatched: on a CPU the allocator
        would wait behind that."""
        if not ok:
            raise AssertionError("the scheduler planned more than the pool holds")
        if int(copies.count):
            self._kv = self.steps.copy_pages(self._kv, jax.device_put(copies, self.device))
        self._tables, self._pool = tables, pool

    def _steps_append(
        self,
        counts: Int32[np.ndarray, " max_seqs"],
        rereads: Int32[np.ndarray, " max_seqs"],
        updates: PageUpdates,
        num_tokens: int,
    ) -> block_tables.Grown:
        """One program for all steps; its batch is cut to the tokens of this one."""
        most = self._config.max_tokens_per_step
        tables, pool, batch, copies, ok = self.steps.append(
            self._tables, self._pool, counts, rereads, updates, num_tokens=most
        )
        # Views of the host's memory: the step's call moves them, which costs less than jax.device_put.
        batch = jax.tree.map(np.asarray, batch)
        batch = replace(
            batch,
            positions=batch.positions[:num_tokens],
            slot_mapping=batch.slot_mapping[:num_tokens],
            max_query_len=num_tokens,
            implementation=self._config.implementation,
        )
        return tables, pool, batch, copies, ok

    @property
    def _most_decoded(self) -> int:
        """Tokens that a call of decode steps computes at most."""
        return self._config.max_seqs * self._config.decode_steps

    def _updates(self, plan: StepPlan, num_tokens: int) -> PageUpdates:
        updates = self._no_updates(num_tokens)
        updates.evicted[: len(plan.evicted)] = plan.evicted
        for i, publication in enumerate(plan.published):
            updates.published_rows[i], updates.published_pages[i] = publication.sequence.placed_row, publication.page
        return updates

    def _no_updates(self, num_tokens: int) -> PageUpdates:
        return PageUpdates.none(num_tokens, self._config.max_seqs, self._layout.page_size)

    def _compute(
        self, token_ids: Int32[np.ndarray, " num_tokens"], work: Batch | DecodeRows, extras: Extras
    ) -> StepOutput:
        output, self._kv = self.steps.step(self.params, token_ids, work, self._kv, extras)
        return jax.tree.map(np.asarray, output)


def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MissingBackendError(
            "the allocator runs on the host's CPU backend, which JAX was told not to start; set JAX_PLATFORMS=cuda,cpu "
            "(or tpu,cpu), or unset it"
        ) from error
