"""One sequence on its way through the engine."""

from dataclasses import dataclass, field

from paged_jax.prefix import CachedPage, PageKeys


@dataclass(eq=False)
class SequenceState:
    """A sequence: a request's only sample, or one of several.

    Attributes:
      child: its number among the request's samples.
      tokens: prompt and answer so far.
      prompt_len: how many of them are the prompt.
      max_len: length at which the answer is cut.
      keys: hashes of its full pages.
      request_id: whose it is, once it is queued; ids count up, so they tell the age.
      end_ids: tokens that end its answer before `max_len` does; None if something else may, which only the host sees.
      reads_cache: whether it may start from cached pages.
      children: siblings that become forks of this sequence once its prompt is computed.
      num_cached: leading tokens whose keys and values are in the pages, as far as the next step goes: computing starts
        here.
      rereads: its last cached token is computed again, for its logits, and not written.
      row: its row of the block table while it runs, else None.
      named: its leading pages as the index knows them, adopted or published.
      publishes: whether its next full page may be named: the chain of its own named pages is unbroken.
      first_page: pages before this one were given back, behind the window of all layers.
      tail: the sequences that share its last, partly filled page; None when it is not shared.
      num_hit: tokens that it found in cached pages when it was first admitted.
      num_preemptions: how often it gave its pages back.
      finish_reason: "stop", "length" or "abort" once it is done.
    """

    child: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    keys: PageKeys
    reads_cache: bool = True
    request_id: int = -1
    end_ids: tuple[int, ...] | None = ()
    children: list["SequenceState"] = field(default_factory=list)
    num_cached: int = 0
    rereads: bool = False
    row: int | None = None
    named: list[CachedPage] = field(default_factory=list)
    publishes: bool = True
    first_page: int = 0
    tail: set["SequenceState"] | None = None
    num_hit: int | None = None
    num_preemptions: int = 0
    finish_reason: str | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first."""
        return self.request_id, self.child

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values its row of the block table holds."""
        return self.num_cached + self.rereads

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next token is known."""
        return len(self.tokens) - self.num_cached

    def steps_left(self, num_steps: int) -> int:
        """How many of so many decode steps it can take part in: one at least, and no more than its length allows."""
        return max(1, min(num_steps, self.max_len - len(self.tokens)))

    @property
    def placed_row(self) -> int:
        """Its row while it runs."""
        assert self.row is not None, "the sequence is not running"
        return self.row
