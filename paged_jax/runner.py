"""The device's side of an engine: page pool, block tables and pages, moved by compiled programs as a plan says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from paged_jax import block_tables, page_pool
from paged_jax.batch import Batch
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.errors import MissingBackendError
from paged_jax.layout import KVLayout
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
        """Allocates, computes, and gives the next token of every row on the host.

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

        longest = max(counts)
        sizes = self._config.decode_sizes if longest == 1 else self._config.prefill_sizes
        size = next(size for size in sizes if size >= max(plan.num_tokens, len(rows)))
        token_ids = np.zeros(size, np.int32)
        token_ids[: plan.num_tokens] = [
            token for seq, count in plan.counts for token in seq.tokens[seq.num_cached : seq.num_cached + count]
        ]

        self._adopt([sequence for sequence in plan.admitted if sequence.named])
        batch = self._append(plan, counts, size, longest)
        num_rows = min(size, self._config.max_seqs)
        wanted = np.zeros(num_rows, np.int32)
        wanted[: len(logit_rows)] = logit_rows
        return self._compute(token_ids, batch, wanted, make_extras(rows, size, num_rows))

    def compile(self, num_tokens: int, longest: int, num_rows: int, extras: Extras) -> None:
        """Compiles the programs of steps of this shape, by a step that computes nothing of use."""
        counts = np.zeros(self._config.max_seqs, np.int32)
        updates = self._no_updates(longest)
        _, _, batch, _, _ = self._steps_append(counts, counts, updates, num_tokens, longest)
        self._compute(np.zeros(num_tokens, np.int32), batch, np.zeros(num_rows, np.int32), extras)

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

    def release(self, rows: Sequence[int]) -> None:
        """Gives back the pages of rows."""
        mask = np.zeros(self._config.max_seqs, bool)
        mask[list(rows)] = True
        self._tables, self._pool = self.steps.release(self._tables, self._pool, mask)

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

    def _append(self, plan: StepPlan, query_lens: list[int], num_tokens: int, longest: int) -> Batch:
        counts = np.zeros(self._config.max_seqs, np.int32)
        rereads = np.zeros(self._config.max_seqs, np.int32)
        rows = [sequence.placed_row for sequence, _ in plan.counts]
        rereads[rows] = [sequence.rereads for sequence, _ in plan.counts]
        counts[rows] = query_lens
        counts -= rereads
        updates = self._no_updates(longest)
        updates.evicted[: len(plan.evicted)] = plan.evicted
        for i, publication in enumerate(plan.published):
            updates.published_rows[i], updates.published_pages[i] = publication.sequence.placed_row, publication.page
        tables, pool, batch, copies, ok = self._steps_append(counts, rereads, updates, num_tokens, longest)
        # Read back before the model is dispatched: on a CPU the allocator would wait behind it.
        if not ok:
            raise AssertionError("the scheduler planned more than the pool holds")
        if int(copies.count):
            self._kv = self.steps.copy_pages(self._kv, jax.device_put(copies, self.device))
        self._tables, self._pool = tables, pool
        return batch

    def _steps_append(
        self, counts: np.ndarray, rereads: np.ndarray, updates: PageUpdates, num_tokens: int, longest: int
    ) -> block_tables.Grown:
        """One program for all decode steps and one for all others; its batch is cut to the tokens of this step."""
        most = self._most_tokens(longest)
        tables, pool, batch, copies, ok = self.steps.append(
            self._tables,
            self._pool,
            counts,
            rereads,
            updates,
            num_tokens=most,
            max_query_len=1 if longest == 1 else most,
        )
        # Views of the host's memory: the step's call moves them, which costs less than jax.device_put.
        batch = jax.tree.map(np.asarray, batch)
        batch = replace(
            batch,
            positions=batch.positions[:num_tokens],
            slot_mapping=batch.slot_mapping[:num_tokens],
            max_query_len=1 if longest == 1 else num_tokens,
        )
        return tables, pool, batch, copies, ok

    def _most_tokens(self, longest: int) -> int:
        return self._config.max_seqs if longest == 1 else self._config.max_tokens_per_step

    def _no_updates(self, longest: int) -> PageUpdates:
        return PageUpdates.none(self._most_tokens(longest), self._config.max_seqs, self._layout.page_size)

    def _compute(self, token_ids: np.ndarray, batch: Batch, logit_rows: np.ndarray, extras: Extras) -> StepOutput:
        batch = replace(batch, logit_rows=logit_rows, implementation=self._config.implementation)
        output, self._kv = self.steps.step(self.params, token_ids, batch, self._kv, extras)
        return jax.tree.map(np.asarray, output)


def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MissingBackendError(
            "the allocator runs on the host's CPU backend, which JAX was told not to start; set JAX_PLATFORMS=cuda,cpu "
            "(or tpu,cpu), or unset it"
        ) from error
