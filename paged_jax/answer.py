"""An answer as it grows: its text, its log probabilities and its end; and what a step must compute for it."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax import sampling
from paged_jax.request import Completion, Request, Times, TokenEvent, Tokenizer
from paged_jax.sequence import SequenceState
from paged_jax.steps import Extras, StepOutput
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
      needs: what it wants of its steps at most.
      prompt_logprobs: float32 [prompt_len - 1], filled as the prompt is computed; empty if not asked for.
    """

    def __init__(self, sequence: SequenceState, request: Request, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.request = request
        self.needs = needs_of(request)
        self._later_needs = self.needs._replace(prompt_logprobs=False)
        self.prompt_logprobs = np.zeros(sequence.prompt_len - 1 if request.prompt_logprobs else 0, np.float32)
        end_ids = frozenset() if tokenizer is None or request.ignore_eos else tokenizer.eos_ids
        self._end_ids = end_ids | frozenset(request.stop_ids)
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._filter = StopFilter(request.stop_strings) if request.stop_strings else None
        self._text: list[str] = []
        self._arrived = time.perf_counter()
        self._started = self._first_token = self._ended = math.nan
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []

    @property
    def next_needs(self) -> Needs:
        """What it wants of its next step: prompts are scored only while they are computed."""
        if self.sequence.num_cached < len(self.prompt_logprobs):
            return self.needs
        return self._later_needs

    def start(self) -> None:
        """The sequence takes part in a step; the first time counts."""
        if math.isnan(self._started):
            self._started = time.perf_counter()

    def end(self, reason: str) -> None:
        """The sequence ends."""
        self.sequence.finish_reason = reason
        self._ended = time.perf_counter()

    def fork_from(self, parent: "Answer") -> None:
        """Its prompt was computed by another of the request's samples."""
        self._started = parent._started
        self.prompt_logprobs[:] = parent.prompt_logprobs

    def take_prompt(self, logprobs: np.ndarray, num_cached: int) -> None:
        """Takes the log probabilities that a step computed of the tokens after `num_cached` and those that follow."""
        part = self.prompt_logprobs[num_cached : num_cached + len(logprobs)]
        part[:] = logprobs[: len(part)]

    def take_token(self, output: StepOutput, row: int) -> TokenEvent:
        """Takes the token of one row of a step: adds it to the sequence, and ends it if it is the last."""
        sequence, token = self.sequence, int(output.tokens[row])
        sequence.tokens.append(token)
        if math.isnan(self._first_token):
            self._first_token = time.perf_counter()
        is_end = token in self._end_ids
        if is_end or len(sequence.tokens) == sequence.max_len:
            self.end("stop" if is_end else "length")
        text = self._new_text(token, is_end)
        if self.request.logprobs is None:
            return TokenEvent(sequence.request_id, token, text, sequence.finish_reason, sequence.child)
        logprob, top = self._new_logprobs(output, row, self.request.logprobs)
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
        started, first, ended = (
            self._ended if math.isnan(x) else x for x in (self._started, self._first_token, self._ended)
        )
        return Times(queue=started - self._arrived, prefill=first - started, decode=ended - first)

    def _new_text(self, token: int, is_end: bool) -> str:
        if self._stream is None:
            return ""
        text = "" if is_end else self._stream.push(token)
        if self.sequence.finish_reason is not None:
            text += self._stream.finish()
        if self._filter is not None:
            text = self._filter.push(text)
            if self._filter.stopped:
                self.end("stop")
            elif self.sequence.finish_reason is not None:
                text += self._filter.finish()
        self._text.append(text)
        return text

    def _new_logprobs(self, output: StepOutput, row: int, count: int) -> tuple[float, dict[int, float]]:
        assert output.logprobs is not None
        logprob = float(output.logprobs.chosen[row])
        ids, values = output.logprobs.top_ids[row, :count].tolist(), output.logprobs.top[row, :count].tolist()
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
