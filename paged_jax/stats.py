"""What an engine counts while it runs."""

from dataclasses import dataclass, replace

import numpy as np

from paged_jax.layout import NULL_PAGE, KVLayout, ceil_div
from paged_jax.outcome import Outcome
from paged_jax.runner import Runner
from paged_jax.scheduler import PrefixStats, Scheduler, StepPlan
from paged_jax.steps import Steps


@dataclass
class EngineStats:
    """Totals since the engine was made.

    Times leave compilation out. A step that computes any part of a prompt counts as prefill, all of it. Decode steps
    that follow one another in one call of the device count one by one; pages taken ahead for them are live, and their
    slots hold no token until its step.

    Attributes:
      layout: geometry of the pages.
      prefill_tokens, prefill_seconds: tokens computed in prefill steps, and their time.
      decode_tokens, decode_seconds: tokens computed in decode steps, and their time.
      num_compilations, compile_seconds: programs compiled, and the time that took.
      peak_pages: most pages live at once.
      peak_seqs: most sequences that ran at once.
      live_slots, live_tokens: slots of the live pages, and tokens in them, summed over the steps.
    """

    layout: KVLayout
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_compilations: int = 0
    compile_seconds: float = 0.0
    peak_pages: int = 0
    peak_seqs: int = 0
    live_slots: int = 0
    live_tokens: int = 0

    @property
    def internal_waste(self) -> float:
        """Fraction of the slots in live pages that held no token, averaged over the steps."""
        return 1 - self.live_tokens / self.live_slots if self.live_slots else 0.0

    def record(
        self, plan: StepPlan, taken: Outcome, seconds: float, steps: Steps, seq_lens: np.ndarray, *, live_pages: int
    ) -> None:
        """Adds the steps of a call, for which `live_pages` pages were in use and the rows so long, slots that were
        taken ahead included."""
        if plan.is_prefill:
            self.prefill_tokens += taken.num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += taken.num_tokens
            self.decode_seconds += seconds
        self.num_compilations = steps.num_compilations
        self.compile_seconds = steps.compile_seconds
        self.peak_pages = max(self.peak_pages, live_pages)
        self.peak_seqs = max(self.peak_seqs, len(plan.counts))
        size = self.layout.page_size
        self.live_slots += taken.num_steps * int(ceil_div(seq_lens, size).sum()) * size
        self.live_tokens += taken.num_steps * int(seq_lens.sum()) - taken.num_unwritten


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot of an engine.

    Attributes:
      pages_live: pages that running requests use.
      pages_cached: pages that only the prefix index holds: they can be evicted.
      pages_free: pages that hold nothing. The three add up to the pool's pages but the null page.
      internal_waste: share of the live pages' slots that hold no token.
      prefix: tokens looked for in cached pages and found, the first time and after preemptions apart.
      num_preemptions: how often a request gave its pages back for want of room.
      num_evictions: cached pages given up for want of room.
      num_running, num_waiting: requests; a request's samples count one by one once they have forked.
      num_compilations: programs compiled so far.
    """

    pages_live: int
    pages_cached: int
    pages_free: int
    internal_waste: float
    prefix: PrefixStats
    num_preemptions: int
    num_evictions: int
    num_running: int
    num_waiting: int
    num_compilations: int


@dataclass(frozen=True)
class PageMap:
    """What every page is used for; the others are free.

    Attributes:
      users: for each live page the ids of the requests whose tables name it, a request's samples one by one.
      cached: pages that only the prefix index holds.
    """

    users: dict[int, list[int]]
    cached: list[int]


def page_map(scheduler: Scheduler, runner: Runner) -> PageMap:
    """The pages of an engine's parts."""
    users: dict[int, list[int]] = {}
    for sequence in scheduler.running:
        for page_id in runner.page_ids[sequence.placed_row].tolist():
            if page_id != NULL_PAGE:
                users.setdefault(page_id, []).append(sequence.request_id)
    return PageMap(users, scheduler.index.unused_page_ids)


def live_pages(scheduler: Scheduler, runner: Runner, layout: KVLayout) -> int:
    """Pages that running sequences use."""
    return layout.num_pages - 1 - scheduler.index.num_unused - runner.num_free


def snapshot(scheduler: Scheduler, runner: Runner, layout: KVLayout) -> EngineMetrics:
    """The state of an engine's parts."""
    live = live_pages(scheduler, runner, layout)
    # Only last pages have slots to spare; forks that have not written yet share theirs.
    page_ids, size = runner.page_ids, layout.page_size
    lengths = [(sequence.placed_row, sequence.num_cached) for sequence in scheduler.running]
    tails = {int(page_ids[row, length // size]): length for row, length in lengths if length % size}
    unused = sum(-length % size for length in tails.values())
    return EngineMetrics(
        pages_live=live,
        pages_cached=scheduler.index.num_unused,
        pages_free=runner.num_free,
        internal_waste=unused / (live * size) if live else 0.0,
        prefix=replace(scheduler.prefix_stats),
        num_preemptions=scheduler.num_preemptions,
        num_evictions=scheduler.index.evictions,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_compilations=runner.steps.num_compilations,
    )
