"""What goes into an engine and what comes out: requests, tokens, finished answers; and the tokenizer between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from paged_jax.sampling import MAX_TOP_LOGPROBS, SamplingParams


@runtime_checkable
class TokenStream(Protocol):
    """Turns the tokens of one answer into text, piece by piece."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What is left."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """What an engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...

    def stream(self) -> TokenStream:
        """A decoder for one answer."""
        ...


@dataclass(frozen=True)
class Request:
    """What to continue.

    Attributes:
      prompt: text (which needs a tokenizer) or token ids; at least one token.
      max_tokens: tokens to generate at most; None for as many as the context and the pool hold.
      ignore_eos: go on after an end token of the tokenizer.
      sampling: how tokens are chosen; greedy by default.
      n: samples; each is a sequence and an answer of its own, and the sample's index enters its keys. They share the
        prompt's pages.
      stop: a string, or several, that end the answer and are not part of its text (need a tokenizer).
      stop_ids: tokens that end the answer, as an end token does.
      logprobs: None for none; else the log probability of each token of the answer is given, and of as many of the
        most likely tokens at its place as this says, 0 to 20.
      prompt_logprobs: give the log probability of each token of the prompt but the first.
      reads_cache: start from cached pages of requests with the same beginning, where there are any.
      cache_salt: only requests with the same salt share pages; against guessing others' prompts by timing.
      extra_keys: whatever else keys and values depend on beside the tokens (an adapter's name, an image's digest); only
        requests with the same ones share pages.

    All log probabilities are the model's own, before logits processor, penalty, temperature and cuts.

    Raises:
      ValueError: a value is out of range.
    """

    prompt: str | Sequence[int]
    max_tokens: int | None = None
    ignore_eos: bool = False
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (immutable)
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    reads_cache: bool = True
    cache_salt: str | None = None
    extra_keys: Sequence[str | bytes | int] = ()

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("the prompt is empty; give at least one token")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty; it would end every answer before its first token")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must be in 0..{MAX_TOP_LOGPROBS}, or None for none, got {self.logprobs}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TokenEvent(NamedTuple):
    """One new token.

    Attributes:
      request_id: whose it is, as `Engine.add_request` gave it.
      token_id: the token.
      text: the text that is now certain; the texts of an answer concatenate to its final text. Empty without a
        tokenizer, inside a character, while a stop string may have begun, and for an end token.
      finish_reason: None while the answer goes on; "stop" at an end token, stop token or stop string, "length" at the
        limit.
      sample: which of the request's n samples.
      logprob: log probability of the token, if asked for.
      top_logprobs: that of the most likely tokens by token id, most likely first; empty unless asked for.
    """

    request_id: int
    token_id: int
    text: str
    finish_reason: str | None
    sample: int = 0
    logprob: float | None = None
    top_logprobs: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Times:
    """How long an answer took, in seconds; compilation included.

    Attributes:
      queue: from the request's arrival to its first step.
      prefill: from there to its first token.
      decode: from there to its end.
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: the answer, the token that ended it included.
      text: the answer as text, up to the stop string if one ended it; "" without a tokenizer.
      finish_reason: "stop", "length" or "abort".
      sample: which of the request's n samples.
      cached_tokens: tokens of the prompt that were in cached pages when it was first admitted.
      times: when it waited and ran.
      logprobs: log probability of each of token_ids, if asked for.
      top_logprobs: for each of token_ids the most likely tokens at its place, as in `TokenEvent`, if asked for.
      prompt_logprobs: log probability of each of prompt_token_ids[1:], if asked for.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    sample: int = 0
    cached_tokens: int = 0
    times: Times = Times()
    logprobs: list[float] | None = None
    top_logprobs: list[Mapping[int, float]] | None = None
    prompt_logprobs: list[float] | None = None
