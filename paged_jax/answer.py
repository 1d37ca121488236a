"""An answer as it grows: its text, its log probabilities and its end; and what a step must compute for it."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax import sampling
from paged_jax.decode import MAX_END_IDS
from paged_jax.request import Completion, Request, Times, TokenEvent, Tokenizer, TokenStream
from paged_jax.sampling import Logprobs
from paged_jax.sequence import SequenceState
from paged_jax.steps import Extras
from paged_jax.stop import StopFilter


class Needs(NamedTuple):
    """What is wanted of a step beyond greedy tokens; each combination is a program of its own (see `steps.Extras`).

    Attributes:
      sampling: drawn tokens, or log probabilities of tokens.
      context: the tokens so far, beside `sampling`.
      prompt_logprobs: log probabilities of prompt tokens.
    """

    sampling: bool = False
    context: bool = False
    prompt_logprobs: bool = False


class Answer:
    """One sequence's answer.

    Args:
      sequence: the sequence; gets the tokens and, at the end, a finish_reason.
      request: what was asked.
      tokenizer: None for an answer without text.

    Attributes:
      sequence, request: as given.
      next_needs: what it wants of its next step: the prompt is scored once.
      prompt_logprobs: float32 [prompt_len - 1], filled as the prompt is computed; empty if not asked for.
    """

    def __init__(self, sequence: SequenceState, request: Request, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.request = request
        self.next_needs = needs_of(request)
        self.prompt_logprobs = np.zeros(sequence.prompt_len - 1 if request.prompt_logprobs else 0, np.float32)
        end_ids = frozenset() if tokenizer is None or request.ignore_eos else tokenizer.eos_ids
        self._end_ids = end_ids | frozenset(request.stop_ids)
        only_tokens = not request.stop_strings and len(self._end_ids) <= MAX_END_IDS
        sequence.end_ids = tuple(self._end_ids) if only_tokens else None
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._filter = StopFilter(request.stop_strings) if request.stop_strings else None
        self._text: list[str] = []
        self._arrived = time.perf_counter()
        self._started: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []

    def start(self) -> None:
        """The sequence was admitted; the first time counts."""
        if self._started is None:
            self._started = time.perf_counter()

    def end(self, reason: str) -> None:
        """The sequence ends."""
        self.sequence.finish_reason = reason
        self._ended = time.perf_counter()

    def fork_from(self, parent: "Answer") -> None:
        """Its prompt was computed by another of the request's samples."""
        self._started = parent._started
        self.next_needs = parent.next_needs
        self.prompt_logprobs[:] = parent.prompt_logprobs

    def take_prompt(self, logprobs: np.ndarray, num_cached: int) -> None:
        """Takes the log probabilities that a step computed of the tokens after `num_cached` and those that follow."""
        part = self.prompt_logprobs[num_cached : num_cached + len(logprobs)]
        part[:] = logprobs[: len(part)]
        if num_cached + len(part) == len(self.prompt_logprobs):
            self.next_needs = self.next_needs._replace(prompt_logprobs=False)

    def take_token(self, token: int, logprobs: Logprobs | None, row: int) -> TokenEvent:
        """Takes the token that a step computed, and its log probabilities, which are of that row: adds it to the
        sequence, and ends it if it is the last."""
        sequence = self.sequence
        sequence.tokens.append(token)
        if self._first_token is None:
            self._first_token = time.perf_counter()
        is_end = token in self._end_ids
        if is_end or len(sequence.tokens) == sequence.max_len:
            self.end("stop" if is_end else "length")
        text = "" if self._stream is None else self._new_text(self._stream, token, is_end)
        if self.request.logprobs is None:
            return TokenEvent(sequence.request_id, token, text, sequence.finish_reason, sequence.child)
        assert logprobs is not None
        logprob, top = self._new_logprobs(logprobs, row, self.request.logprobs)
        return TokenEvent(sequence.request_id, token, text, sequence.finish_reason, sequence.child, logprob, top)

    def completion(self) -> Completion:
        """The answer, once it is finished."""
        sequence, request = self.sequence, self.request
        assert sequence.finish_reason is not None
        return Completion(
            prompt_token_ids=sequence.tokens[: sequence.prompt_len],
            token_ids=sequence.tokens[sequence.prompt_len :],
            text="".join(self._text),
            finish_reason=sequence.finish_reason,
            sample=sequence.child,
            cached_tokens=sequence.num_hit or 0,
            times=self._times(),
            logprobs=None if request.logprobs is None else self._logprobs,
            top_logprobs=list(self._top_logprobs) if request.logprobs else None,
            prompt_logprobs=self.prompt_logprobs.tolist() if request.prompt_logprobs else None,
        )

    def _times(self) -> Times:
        # What an aborted answer never reached took no time.
        ended = self._ended
        assert ended is not None, "the answer is not finished"
        started, first = (ended if time is None else time for time in (self._started, self._first_token))
        return Times(queue=started - self._arrived, prefill=first - started, decode=ended - first)

    def _new_text(self, stream: TokenStream, token: int, is_end: bool) -> str:
        text = "" if is_end else stream.push(token)
        if self.sequence.finish_reason is not None:
            text += stream.finish()
        if self._filter is not None:
            text = self._filter.push(text)
            if self._filter.stopped:
                self.end("stop")
            elif self.sequence.finish_reason is not None:
                text += self._filter.finish()
        self._text.append(text)
        return text

    def _new_logprobs(self, logprobs: Logprobs, row: int, count: int) -> tuple[float, dict[int, float]]:
        logprob = float(logprobs.chosen[row])
        ids, values = logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist()
        top = dict(zip(ids, values, strict=True))
        self._logprobs.append(logprob)
        self._top_logprobs.append(top)
        return logprob, top


def needs_of(request: Request) -> Needs:
    """What a request wants of its steps."""
    params = request.sampling
    context = params.repetition_penalty != 1
    return Needs(params.temperature > 0 or context or request.logprobs is not None, context, request.prompt_logprobs)


def extras(needs: Needs, answers: Sequence[tuple[Answer, int]], *, num_tokens: int, rows: int, max_len: int) -> Extras:
    """The host arrays of a step that computes some tokens of each answer's sequence, packed in this order.

    Args:
      needs: what is wanted of the step.
      answers: (answer, tokens to compute); as rows of the step.
      num_tokens: length of the packed tokens.
      rows: rows of logits.
      max_len: longest sequence.
    """
    sampled = context = targets = None
    if needs.sampling:
        params = [
            (answer.request.sampling, answer.sequence.child, answer.request.logprobs or 0) for answer, _ in answers
        ]
        sampled = sampling.pack(params, rows)
    if needs.context:
        context = np.full((rows, max_len), -1, np.int32)
        for row, (answer, _) in enumerate(answers):
            context[row, : len(answer.sequence.tokens)] = answer.sequence.tokens
    if needs.prompt_logprobs:
        targets = np.zeros(num_tokens, np.int32)
        start = 0
        for answer, count in answers:
            following = answer.sequence.tokens[answer.sequence.num_cached + 1 :][:count]
            targets[start : start + len(following)] = following
            start += count
    return Extras(sampled, context, targets)
