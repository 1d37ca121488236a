"""What goes into an engine and what comes out: requests, tokens, finished answers; and the tokenizer between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
      ignore_eos: go on after an end token.
    """

    prompt: str | Sequence[int]
    max_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class TokenEvent:
    """One new token.

    Attributes:
      request_id: whose it is, as `Engine.add_request` gave it.
      token_id: the token.
      text: the text it completes; empty without a tokenizer, inside a character, and for an end token.
      finish_reason: None while the answer goes on; "stop" at an end token, "length" at the limit.
    """

    request_id: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: the answer, its end token included.
      text: the answer as text, "" without a tokenizer.
      finish_reason: "stop" or "length".
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
