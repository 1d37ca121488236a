"""Which sequences run, and how many tokens of each the next step computes. Plain Python on the host.

First come, first served. Every sequence that decodes gets a token in every step; what the step's budget leaves goes to
prompts, so chunks of prompts and decodes share one ragged batch. Pages are taken as sequences grow. When they run out,
cached pages that nobody uses are evicted; when those run out too, the newest sequence gives its pages back and returns
to the head of the queue with its tokens, to be computed again (recomputation: Kwon et al. 2023, section 4.5). The
oldest sequence never gives way and fits the pool alone, so it always comes to its end.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.layout import KVLayout, ceil_div
from paged_jax.prefix import CachedPage, Namespace, PrefixIndex
from paged_jax.sequence import SequenceState

_WATERMARK = 0.01  # share of the pool that an admission leaves free beside running sequences, lest it preempt at once


@dataclass(frozen=True)
class Publication:
    """A page that the step fills, to be named by the index once the step was issued.

    Attributes:
      sequence: its writer.
      page: its place in the sequence, in pages.
      key: its chained hash.
    """

    sequence: SequenceState
    page: int
    key: bytes


@dataclass
class StepPlan:
    """The next step.

    Attributes:
      counts: (sequence, tokens to compute) in the order of their rows, each number at least 1.
      num_tokens: the sum of these numbers.
      num_new_pages: pages that the step takes from the pool.
      evicted: pages that the index has forgotten; they are released before anything is allocated.
      admitted: sequences that start in this step; their cached pages (`named`) are to be put into their rows first.
      published: pages that the step fills and the index will name.
      forked: sequences whose prompt ends in this step, and the children that fork from each.
      is_prefill: whether some sequence computes part of its prompt.
      num_steps: decode steps that follow one another in this call. The counts are those of the first step; pages are
        taken for all of them, as far as each sequence's length allows.
      stops_together: all stop after the step in which the first sequence ends, since another waits for its row.
    """

    counts: list[tuple[SequenceState, int]]
    num_tokens: int = 0
    num_new_pages: int = 0
    evicted: list[int] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    published: list[Publication] = field(default_factory=list)
    forked: list[tuple[SequenceState, list[SequenceState]]] = field(default_factory=list)
    is_prefill: bool = False
    num_steps: int = 1
    stops_together: bool = False


@dataclass
class PrefixStats:
    """Tokens looked for in cached pages, and found.

    Attributes:
      queried, hit: when sequences were admitted for the first time.
      requeried, rehit: when they came back after a preemption or a failed step.
    """

    queried: int = 0
    hit: int = 0
    requeried: int = 0
    rehit: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of first-time tokens found in cached pages."""
        return self.hit / self.queried if self.queried else 0.0


class Scheduler:
    """Queues of waiting and running sequences, and which pages they share.

    Args:
      config: limits of the engine.
      layout: geometry of the pages.

    Attributes:
      waiting, running: sequences, the oldest first.
      index: the prefix index.
      prefix_stats: what it was asked, and what it knew.
      num_preemptions: how often a sequence gave its pages back for want of room.
    """

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        self._config = config
        self._layout = layout
        self._free_rows = list(range(config.max_seqs - 1, -1, -1))
        self._watermark = int(_WATERMARK * (layout.num_pages - 1))
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.index = PrefixIndex(layout.page_size)
        self.prefix_stats = PrefixStats()
        self.num_preemptions = 0

    def add(self, sequence: SequenceState) -> None:
        """Puts a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def plan(self, num_free: int, release: Callable[[int], int], max_steps: int = 1) -> StepPlan | None:
        """Makes room for the running sequences, admits what fits, and gives the next step; None when nothing is left to
        do.

        Several decode steps follow one another only where nothing could come between them: every sequence decodes,
        nobody could be admitted before one of them ends, the device sees each end by itself, and there is room for
        their tokens without anybody giving way.

        Args:
          num_free: free pages of the pool.
          release: gives back the pages of a row, whose sequence gives way, and returns how many are free then.
          max_steps: decode steps that may follow one another in one call.
        """
        counts = self._running_counts()
        needed = self._pages_needed(counts)
        while needed > num_free + self.index.num_unused:
            assert len(self.running) > 1, "a sequence that cannot fit the pool alone was not refused"
            self.num_preemptions += 1
            num_free = release(self._requeue(self.running[-1]))
            counts = self._running_counts()
            needed = self._pages_needed(counts)
        plan = StepPlan(counts)
        if self.waiting:  # in most steps nobody is
            self._admit(plan, num_free)
            needed = self._pages_needed(counts)
        if not counts:
            return None
        plan.is_prefill = any(count > 1 or seq.num_cached < seq.prompt_len for seq, count in counts)
        if max_steps > 1 and not plan.is_prefill and self._nothing_comes_between():
            ahead = self._pages_needed([(seq, seq.steps_left(max_steps)) for seq, _ in counts])
            if ahead <= num_free + self.index.num_unused:
                needed, plan.num_steps, plan.stops_together = ahead, max_steps, bool(self.waiting)
        plan.evicted = self.index.evict(max(0, needed - num_free))
        counts.sort(key=_row)
        plan.num_new_pages = needed
        plan.num_tokens = sum(count for _, count in counts)
        plan.published = self._publications((seq, seq.num_cached + count) for seq, count in counts)
        self._plan_forks(plan)
        return plan

    def commit(self, plan: StepPlan, page_ids: np.ndarray) -> None:
        """Takes note of a step that was issued: what is cached now, which pages have names, and which rows forked.

        Args:
          plan: the step.
          page_ids: int32 [max_seqs, pages_per_seq], the block tables after it.
        """
        for sequence, count in plan.counts:
            sequence.num_cached += count
            sequence.rereads = False
            sequence.tail = None  # whoever shared a partly filled page has written, and so has a page of its own
        self._publish(plan.published, page_ids)
        for parent, children in plan.forked:
            self._fork(parent, children)

    def go_on(self, sequences: Sequence[SequenceState], page_ids: np.ndarray) -> list[Publication]:
        """Takes note that sequences took part in one more decode step of a call that was committed: each one's last
        token is cached now.

        Args:
          sequences: those that had not ended.
          page_ids: int32 [max_seqs, pages_per_seq], the block tables.

        Returns:
          The pages that this filled and the index names now.
        """
        for sequence in sequences:
            sequence.num_cached += 1
        size = self._layout.page_size
        filled = self._publications((seq, seq.num_cached) for seq in sequences if seq.num_cached % size == 0)
        self._publish(filled, page_ids)
        return filled

    def finish(self, sequence: SequenceState) -> int:
        """Takes a running sequence out and returns its row, whose pages are to be released."""
        row = sequence.placed_row
        self.running.remove(sequence)
        self._free_rows.append(row)
        self.index.release(sequence.named[sequence.first_page :])
        if sequence.tail is not None:
            sequence.tail.discard(sequence)
        sequence.row, sequence.tail = None, None
        return row

    def abort(self, sequence: SequenceState) -> int | None:
        """Takes a sequence out wherever it is; returns the row whose pages are to be released if it was running."""
        if sequence.row is not None:
            return self.finish(sequence)
        if sequence in self.waiting:  # a child that has not forked yet is nowhere
            self.waiting.remove(sequence)
        return None

    def requeue_running(self) -> list[int]:
        """Sends all running sequences back to the head of the queue, tokens kept; returns the rows they had."""
        return [self._requeue(sequence) for sequence in reversed(self.running[:])]

    def behind_window(self, window: int) -> dict[int, int]:
        """Rows that may give back pages behind the window of all layers: their first page that is still needed."""
        rows = {}
        for sequence in self.running:
            first = max(0, sequence.num_cached + 1 - window) // self._layout.page_size
            if first > sequence.first_page:
                self.index.release(sequence.named[sequence.first_page : first])
                sequence.first_page = first
                rows[sequence.placed_row] = first
        return rows

    def _nothing_comes_between(self) -> bool:
        """Whether decode steps may follow one another, as far as pages do not matter."""
        is_full = not self._free_rows or not self.waiting
        return is_full and all(seq.num_left == 1 and seq.end_ids is not None for seq in self.running)

    def _running_counts(self) -> list[tuple[SequenceState, int]]:
        lefts = [len(sequence.tokens) - sequence.num_cached for sequence in self.running]
        budget = self._config.max_tokens_per_step - lefts.count(1)
        counts = []
        for sequence, left in zip(self.running, lefts, strict=True):
            if left > 1:
                left = min(left, budget)
                budget -= left
            if left:
                counts.append((sequence, left))
        return counts

    def _pages_needed(self, counts: list[tuple[SequenceState, int]]) -> int:
        """Pages that a step takes: new ones, and the copies of partly filled pages that sequences share."""
        size = self._layout.page_size
        grown = sum(ceil_div(seq.num_cached + count, size) - ceil_div(seq.num_stored, size) for seq, count in counts)
        return grown + _tail_copies(sequence for sequence, _ in counts)

    def _admit(self, plan: StepPlan, num_free: int) -> None:
        budget = self._config.max_tokens_per_step - sum(count for _, count in plan.counts)
        pending = {key for sequence in self.running for key in self._pending(sequence)}
        for sequence in list(self.waiting):
            if not self._free_rows or budget < 1:
                return
            chain = self.index.match(sequence.keys, sequence.tokens) if sequence.reads_cache else []
            if sequence.reads_cache and self._next_key(sequence, len(chain)) in pending:
                continue  # another sequence is computing its next page
            self.index.acquire(chain)
            if not self._has_room(sequence, len(chain), num_free):
                self.index.release(chain)
                return
            self._start(sequence, chain)
            count = min(sequence.num_left, budget)
            budget -= count
            plan.counts.append((sequence, count))
            plan.admitted.append(sequence)
            pending.update(self._pending(sequence))

    def _has_room(self, sequence: SequenceState, num_cached: int, num_free: int) -> bool:
        """Whether the whole prompt, and the copies that its forks will make, fit beside the running sequences."""
        if not self.running:
            return True
        pages_for, size = self._layout.pages_for, self._layout.page_size
        spoken_for = sum(pages_for(len(other.tokens)) - pages_for(other.num_stored) for other in self.running)
        spoken_for += _tail_copies(self.running)
        needed = pages_for(len(sequence.tokens)) - num_cached
        needed += len(sequence.children) if len(sequence.tokens) % size else 0
        return needed + spoken_for + self._watermark <= num_free + self.index.num_unused

    def _start(self, sequence: SequenceState, chain: list[CachedPage]) -> None:
        num_hit = len(chain) * self._layout.page_size
        self._count_hit(sequence, num_hit)
        sequence.named = chain
        sequence.publishes = self._config.prefix_caching
        sequence.rereads = num_hit == len(sequence.tokens)
        sequence.num_cached = num_hit - sequence.rereads
        sequence.row = self._free_rows.pop()
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda other: other.age)

    def _count_hit(self, sequence: SequenceState, num_hit: int) -> None:
        if sequence.num_hit is None:
            sequence.num_hit = num_hit
            self.prefix_stats.queried += len(sequence.tokens)
            self.prefix_stats.hit += num_hit
        else:
            self.prefix_stats.requeried += len(sequence.tokens)
            self.prefix_stats.rehit += num_hit

    def _next_key(self, sequence: SequenceState, page: int) -> bytes | None:
        if (page + 1) * self._layout.page_size > len(sequence.tokens):
            return None
        return sequence.keys.upto(sequence.tokens, page + 1)[page]

    def _pending(self, sequence: SequenceState) -> list[bytes]:
        """Keys of the pages of its known tokens that a running sequence has yet to publish."""
        if not sequence.publishes or sequence.num_left == 1:
            return []
        num_full = len(sequence.tokens) // self._layout.page_size
        keys = sequence.keys.upto(sequence.tokens, num_full)
        return keys[len(sequence.named) :]

    def _publications(self, lengths: Iterable[tuple[SequenceState, int]]) -> list[Publication]:
        """The pages to be named once so many tokens of each sequence are cached."""
        published: list[Publication] = []
        claimed: set[bytes] = set()
        for sequence, length in lengths:
            num_full = length // self._layout.page_size
            if not sequence.publishes or num_full <= len(sequence.named):
                continue
            keys = sequence.keys.upto(sequence.tokens, num_full)[len(sequence.named) :]
            sequence.publishes = self.index.has(_parent(sequence))
            for page, key in enumerate(keys, start=len(sequence.named)):
                # The first of equal pages gets the name; a copy's chain would hang on pages that it does not hold.
                sequence.publishes = sequence.publishes and key not in self.index and key not in claimed
                if not sequence.publishes:
                    break
                claimed.add(key)
                published.append(Publication(sequence, page, key))
        return published

    def _publish(self, publications: Iterable[Publication], page_ids: np.ndarray) -> None:
        for publication in publications:
            sequence, page = publication.sequence, publication.page
            tokens = tuple(sequence.tokens[page * self._layout.page_size : (page + 1) * self._layout.page_size])
            page_id = int(page_ids[sequence.placed_row, page])
            sequence.named.append(self.index.publish(publication.key, _parent(sequence), tokens, page_id))

    def _plan_forks(self, plan: StepPlan) -> None:
        rows = len(self._free_rows)
        for sequence, count in plan.counts:
            if sequence.children and count == sequence.num_left:
                fitting = sequence.children[:rows]
                rows -= len(fitting)
                plan.forked.append((sequence, fitting))

    def _fork(self, parent: SequenceState, children: list[SequenceState]) -> None:
        # Those that found no row come back as sequences of their own, first in the queue by their age.
        self.waiting.extendleft(reversed(parent.children[len(children) :]))
        parent.children = []
        for child in children:
            child.row = self._free_rows.pop()
            child.num_cached, child.publishes, child.num_hit = parent.num_cached, parent.publishes, parent.num_cached
            child.named = list(parent.named)
            self.index.acquire(child.named)
            insort(self.running, child, key=lambda other: other.age)
        if children and parent.num_cached % self._layout.page_size:
            shared = {parent, *children}
            for sequence in shared:
                sequence.tail = shared

    def _requeue(self, sequence: SequenceState) -> int:
        row = self.finish(sequence)
        sequence.num_preemptions += 1
        sequence.num_cached, sequence.rereads, sequence.named, sequence.first_page = 0, False, [], 0
        self.waiting.appendleft(sequence)
        return row


def _tail_copies(sequences: Iterable[SequenceState]) -> int:
    """Copies that the next step makes of partly filled pages: of those who share one, the last to write keeps it."""
    tails = {id(sequence.tail): sequence.tail for sequence in sequences if sequence.tail}
    return sum(len(tail) - 1 for tail in tails.values())


def _row(item: tuple[SequenceState, int]) -> int:
    return item[0].placed_row


def _parent(sequence: SequenceState) -> CachedPage | Namespace:
    return sequence.named[-1] if sequence.named else sequence.keys.namespace
