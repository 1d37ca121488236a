"""Which sequences run, and how many tokens of each the next step computes. Plain Python on the host.

First come, first served. A waiting sequence is admitted when a row is free and the pages that it may come to need
are not spoken for, so a running sequence never lacks a page. Pages themselves are taken one by one as it grows.
"""

from collections import deque
from dataclasses import dataclass, field

from paged_jax.config import EngineConfig
from paged_jax.layout import KVLayout


@dataclass(eq=False)
class SequenceState:
    """One sequence on its way.

    Attributes:
      request_id: whose it is.
      tokens: prompt and answer so far.
      prompt_len: how many of them are the prompt.
      max_len: length at which the answer is cut; prompt_len for a prompt that is only scored.
      child: which of its request's samples.
      num_cached: leading tokens whose keys and values are in the pages.
      row: its row of the block table while it runs, else None.
      finish_reason: "stop" or "length" once it is done.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    child: int = 0
    num_cached: int = 0
    row: int | None = None
    finish_reason: str | None = None

    @property
    def most_cached(self) -> int:
        """Tokens whose keys and values it may come to keep: the last one is never fed back."""
        return max(self.max_len - 1, self.prompt_len)


@dataclass(frozen=True)
class StepPlan:
    """The next step: tokens to compute of each sequence, in the order of their rows.

    Attributes:
      counts: (sequence, number of tokens), each number at least 1.
      is_prefill: whether some sequence computes part of its prompt.
    """

    counts: list[tuple[SequenceState, int]] = field(default_factory=list)
    is_prefill: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(count for _, count in self.counts)


class Scheduler:
    """Queues of waiting and running sequences."""

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        self._config = config
        self._layout = layout
        self._free_rows = list(range(config.max_seqs - 1, -1, -1))
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []

    def add(self, sequence: SequenceState) -> None:
        """Puts a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def plan(self) -> StepPlan | None:
        """Admits what fits and gives the next step, or None when nothing is left to do.

        Every running sequence gets a token; what the step's budget leaves goes to prompts, first come first served.
        """
        self._admit()
        if not self.running:
            return None
        budget = self._config.max_tokens_per_step - len(self.running)
        counts = []
        for sequence in self.running:
            extra = min(len(sequence.tokens) - sequence.num_cached - 1, budget)
            budget -= extra
            counts.append((sequence, 1 + extra))
        is_prefill = any(count > 1 or seq.num_cached < seq.prompt_len for seq, count in counts)
        return StepPlan(sorted(counts, key=_row), is_prefill)

    def finish(self, sequence: SequenceState) -> None:
        """Takes a running sequence out and frees its row; its pages are the caller's to release."""
        self.running.remove(sequence)
        assert sequence.row is not None
        self._free_rows.append(sequence.row)
        sequence.row = None

    def requeue_running(self) -> None:
        """Sends all running sequences back to the head of the queue, tokens kept, nothing cached."""
        for sequence in reversed(self.running[:]):
            self.finish(sequence)
            sequence.num_cached = 0
            self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        spoken_for = sum(self._layout.pages_for(sequence.most_cached) for sequence in self.running)
        while self.waiting and self._free_rows:
            spoken_for += self._layout.pages_for(self.waiting[0].most_cached)
            if spoken_for > self._layout.num_pages - 1:
                return
            sequence = self.waiting.popleft()
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)


def _row(item: tuple[SequenceState, int]) -> int:
    row = item[0].row
    assert row is not None
    return row
