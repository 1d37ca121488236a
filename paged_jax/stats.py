"""What an engine counts while it runs."""

from dataclasses import dataclass

from paged_jax.layout import KVLayout
from paged_jax.scheduler import StepPlan
from paged_jax.steps import Steps


@dataclass
class EngineStats:
    """Totals since the engine was made.

    Times leave compilation out. A step that computes any part of a prompt counts as prefill, all of it.

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

    def record(self, plan: StepPlan, seconds: float, steps: Steps) -> None:
        """Adds one step that has just been computed."""
        if plan.is_prefill:
            self.prefill_tokens += plan.num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += plan.num_tokens
            self.decode_seconds += seconds
        self.num_compilations = steps.num_compilations
        self.compile_seconds = steps.compile_seconds
        lengths = [sequence.num_cached + count for sequence, count in plan.counts]
        pages = sum(self.layout.pages_for(length) for length in lengths)
        self.peak_pages = max(self.peak_pages, pages)
        self.peak_seqs = max(self.peak_seqs, len(lengths))
        self.live_slots += pages * self.layout.page_size
        self.live_tokens += sum(lengths)
