"""Whether a request can run at all: checked before anything is queued."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paged_jax import steps
from paged_jax.answer import Answer
from paged_jax.config import EngineConfig
from paged_jax.errors import RequestTooLongError
from paged_jax.layout import KVLayout
from paged_jax.prefix import Namespace, PageKeys
from paged_jax.request import Request, Tokenizer
from paged_jax.sequence import SequenceState
from paged_jax.steps import Model


class Admission:
    """What an engine's model, tokenizer, context and pool allow."""

    def __init__(
        self, model: Model, params: Any, layout: KVLayout, tokenizer: Tokenizer | None, config: EngineConfig
    ) -> None:
        self._model = model
        self._params = params
        self._layout = layout
        self._tokenizer = tokenizer
        self._config = config

    @property
    def max_len(self) -> int:
        """Longest sequence: what the context and the pool hold."""
        return min(self._config.max_model_len, (self._layout.num_pages - 1) * self._layout.page_size)

    @cached_property
    def vocab_size(self) -> int:
        """Width of the model's logits; the first use traces the model."""
        return steps.vocab_size(self._model, self._params, self._layout)

    def samples(self, request: Request | str | Sequence[int]) -> list[Answer]:
        """The answers to a request (a bare prompt stands for `Request(prompt)`), not queued yet, one for each sample.

        Raises:
          ValueError, RequestTooLongError: see `prompt` and `length`.
        """
        request = request if isinstance(request, Request) else Request(request)
        tokens = self.prompt(request)
        return self._answers(request, tokens, self.length(len(tokens), request.max_tokens))

    def scored(self, token_ids: Sequence[int]) -> Answer:
        """The answer to a request that wants log probabilities of its tokens and nothing new.

        Raises:
          ValueError, RequestTooLongError: see `prompt` and `scored_length`.
        """
        request = Request(token_ids, prompt_logprobs=True)
        tokens = self.prompt(request)
        (answer,) = self._answers(request, tokens, self.scored_length(len(tokens)))
        return answer

    def prompt(self, request: Request) -> list[int]:
        """The prompt's tokens.

        Raises:
          ValueError: text or stop strings without a tokenizer, an empty prompt, or a token outside the vocabulary.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("the prompt is text, but the engine has no tokenizer; give token ids")
            prompt = self._tokenizer.encode(prompt)
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
        if request.stop_strings and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the engine has none; give stop_ids")
        for name, tokens in (("the prompt", prompt), ("stop_ids", request.stop_ids)):
            wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
            if wrong:
                last = self.vocab_size - 1
                raise ValueError(f"{name} has token {wrong[0]}, outside the model's vocabulary 0..{last}")
        return list(prompt)

    def length(self, prompt_len: int, max_tokens: int | None) -> int:
        """Length at which a sequence is cut.

        Raises:
          RequestTooLongError: the prompt leaves no room for a token, or max_tokens can never fit the pool.
        """
        self._check_fits(prompt_len, self.max_len - 1, "beside one new token ")
        wanted = self._config.max_model_len if max_tokens is None else prompt_len + max_tokens
        wanted = min(wanted, self._config.max_model_len)
        if max_tokens is not None and wanted > self.max_len:
            raise RequestTooLongError(
                f"prompt and max_tokens come to {wanted} tokens, but the pool ({self._layout.num_pages - 1} pages of "
                f"{self._layout.page_size} tokens) holds {self.max_len}; lower max_tokens to at most "
                f"{self.max_len - prompt_len} or take more pages"
            )
        return min(wanted, self.max_len)

    def scored_length(self, prompt_len: int) -> int:
        """Length of a sequence that is only scored.

        Raises:
          RequestTooLongError: it can never fit.
        """
        self._check_fits(prompt_len, self.max_len, "")
        return prompt_len

    def _check_fits(self, prompt_len: int, largest: int, beside: str) -> None:
        if prompt_len > largest:
            raise RequestTooLongError(
                f"the prompt has {prompt_len} tokens, but at most {largest} fit {beside}"
                f"(max_model_len {self._config.max_model_len}, pool {self._layout.num_pages - 1} pages of "
                f"{self._layout.page_size} tokens)"
            )

    def _answers(self, request: Request, tokens: list[int], max_len: int) -> list[Answer]:
        namespace = Namespace(request.cache_salt, tuple(request.extra_keys))
        # Log probabilities of a prompt are computed, not remembered.
        reads_cache = self._config.prefix_caching and request.reads_cache and not request.prompt_logprobs
        sequences = [
            SequenceState(
                child, list(tokens), len(tokens), max_len, PageKeys(namespace, self._layout.page_size), reads_cache
            )
            for child in range(request.n)
        ]
        sequences[0].children = sequences[1:]
        return [Answer(sequence, request, self._tokenizer) for sequence in sequences]
