"""The engine: takes requests, runs them together out of one pool of pages, and gives their tokens as they come."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import pallas_kernels
from paged_jax import block_tables, page_pool
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.errors import MissingBackendError, RequestTooLongError
from paged_jax.layout import KVLayout
from paged_jax.page_pool import PagePool
from paged_jax.request import Completion, Request, TokenEvent, Tokenizer, TokenStream
from paged_jax.scheduler import Scheduler, SequenceState, StepPlan
from paged_jax.stats import EngineStats
from paged_jax.steps import Model, Steps


@dataclass(eq=False)
class _Answer:
    sequence: SequenceState
    stream: TokenStream | None
    text: list[str] = field(default_factory=list)


class Engine:
    """Generates greedily for many requests at once.

    The allocator's state (block tables and page pool) lives on the host's CPU device, the pages beside the
    parameters. A step that raises leaves no request lost: the pages are dropped, what ran goes back to the queue with
    its tokens, and the next step computes it anew.

    Args:
      model: the model contract (see `paged_jax.steps.Model`).
      params: its parameters.
      layout: geometry of the pages, their number included (see `paged_jax.budget.size_pool`).
      tokenizer: for prompts and answers as text; None for token ids alone.
      config: limits and choices.

    Raises:
      MissingBackendError: JAX was started without its CPU backend.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        layout: KVLayout,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.layout = layout
        self.stats = EngineStats(layout)
        self._params = params
        self._tokenizer = tokenizer
        self._eos_ids = frozenset() if tokenizer is None else tokenizer.eos_ids
        (self._device,) = jax.tree.leaves(params)[0].devices()
        self._host = _cpu_device()
        self._steps = Steps(model, page_size=layout.page_size)
        self._scheduler = Scheduler(self.config, layout)
        self._answers: dict[int, _Answer] = {}
        self._ids = itertools.count()
        self._tables, self._pool, self._kv = self._empty_cache()

    @property
    def implementation(self) -> str:
        """The attention implementation in use, and why."""
        if self.config.implementation is not None:
            return f"{self.config.implementation} (asked for)"
        return f"{pallas_kernels.default_implementation()} (default on {self._device.platform})"

    @property
    def max_request_len(self) -> int:
        """Longest prompt and answer together, in tokens: what the context and the pool hold."""
        return min(self.config.max_model_len, (self.layout.num_pages - 1) * self.layout.page_size)

    def add_request(self, request: Request) -> int:
        """Queues a request and returns its id.

        Raises:
          ValueError: the prompt is empty or is text without a tokenizer, or max_tokens is below 1.
          RequestTooLongError: the prompt leaves no room for a token, or max_tokens can never fit the pool.
        """
        return self._enqueue(self._checked(request))

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns the tokens it made; nothing when no request is left.

        Raises:
          Exception: whatever the model's step raised; no request is lost.
        """
        plan = self._scheduler.plan()
        if plan is None:
            return []
        started, compiled = time.perf_counter(), self._steps.compile_seconds
        try:
            next_tokens = self._run(plan)
        except BaseException:
            # The donated pages are gone; what ran starts over from its tokens.
            self._tables, self._pool, self._kv = self._empty_cache()
            self._scheduler.requeue_running()
            raise
        elapsed = time.perf_counter() - started - (self._steps.compile_seconds - compiled)
        self.stats.record(plan, elapsed, self._steps)
        events = self._accept(plan, next_tokens)
        self._release_finished(plan)
        return events

    def generate(
        self,
        requests: Iterable[Request | str | Sequence[int]],
        *,
        on_token: Callable[[int, TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Runs requests to their end and returns the answers in the order of the requests.

        Args:
          requests: requests; a bare prompt stands for `Request(prompt)`. All are checked before any of them runs.
          on_token: called as `on_token(index, event)` for every token, where index is the place in `requests`.

        Raises:
          ValueError, RequestTooLongError: a request is refused (see `add_request`); none has run.
        """
        checked = [self._checked(request if isinstance(request, Request) else Request(request)) for request in requests]
        index = {self._enqueue(sequence): i for i, sequence in enumerate(checked)}
        answers = {i: self._answers[request_id] for request_id, i in index.items()}
        while any(answer.sequence.finish_reason is None for answer in answers.values()):
            for event in self.step():
                if on_token is not None and event.request_id in index:
                    on_token(index[event.request_id], event)
        return [_completion(answers[i]) for i in range(len(checked))]

    def warm_up(self) -> None:
        """Compiles every program that a run can need, so that none is compiled while requests wait."""
        sizes = [(size, 1, size) for size in self.config.decode_sizes]
        sizes += [(size, size, min(size, self.config.max_seqs)) for size in self.config.prefill_sizes]
        for num_tokens, longest, rows in sizes:
            counts = np.zeros(self.config.max_seqs, np.int32)
            _, _, batch, _, _ = self._append(counts, num_tokens, longest)
            self._compute(np.zeros(num_tokens, np.int32), batch, np.zeros(rows, np.int32))
        self._release(np.zeros(self.config.max_seqs, bool))

    def _checked(self, request: Request) -> SequenceState:
        tokens = self._prompt_tokens(request)
        max_len = self._max_len(len(tokens), request.max_tokens)
        return SequenceState(next(self._ids), tokens, len(tokens), max_len, request.ignore_eos)

    def _enqueue(self, sequence: SequenceState) -> int:
        self._answers[sequence.request_id] = _Answer(sequence, self._tokenizer.stream() if self._tokenizer else None)
        self._scheduler.add(sequence)
        return sequence.request_id

    def _prompt_tokens(self, request: Request) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("the prompt is text, but the engine has no tokenizer; give token ids")
            prompt = self._tokenizer.encode(prompt)
        if not len(prompt):
            raise ValueError("the prompt is empty; give at least one token")
        return list(prompt)

    def _max_len(self, prompt_len: int, max_tokens: int | None) -> int:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        largest = self.max_request_len
        if prompt_len >= largest:
            raise RequestTooLongError(
                f"the prompt has {prompt_len} tokens, but at most {largest - 1} fit beside one new token "
                f"(max_model_len {self.config.max_model_len}, pool {self.layout.num_pages - 1} pages of "
                f"{self.layout.page_size} tokens)"
            )
        wanted = self.config.max_model_len if max_tokens is None else prompt_len + max_tokens
        wanted = min(wanted, self.config.max_model_len)
        if max_tokens is not None and wanted > largest:
            raise RequestTooLongError(
                f"prompt and max_tokens come to {wanted} tokens, but the pool ({self.layout.num_pages - 1} pages of "
                f"{self.layout.page_size} tokens) holds {largest}; lower max_tokens to at most {largest - prompt_len} "
                "or take more pages"
            )
        return min(wanted, largest)

    def _run(self, plan: StepPlan) -> np.ndarray:
        """Allocates, computes and returns the next token of every sequence of the plan, in its order."""
        counts = np.zeros(self.config.max_seqs, np.int32)
        for sequence, count in plan.counts:
            counts[sequence.row] = count
        longest = max(count for _, count in plan.counts)
        sizes = self.config.decode_sizes if longest == 1 else self.config.prefill_sizes
        size = next(size for size in sizes if size >= plan.num_tokens)
        tables, pool, batch, _, ok = self._append(counts, size, 1 if longest == 1 else size)
        # Read back before the model is dispatched: on a CPU the allocator would wait behind it.
        if not ok:
            raise AssertionError("the scheduler planned more than the pool holds")

        token_ids = np.zeros(size, np.int32)
        logit_rows = np.zeros(min(size, self.config.max_seqs), np.int32)
        start = 0
        for i, (sequence, count) in enumerate(plan.counts):
            token_ids[start : start + count] = sequence.tokens[sequence.num_cached : sequence.num_cached + count]
            start += count
            logit_rows[i] = start - 1
        next_tokens = self._compute(token_ids, batch, logit_rows)
        self._tables, self._pool = tables, pool
        return next_tokens

    def _append(self, counts: np.ndarray, num_tokens: int, longest: int) -> block_tables.Grown:
        return self._steps.append(self._tables, self._pool, counts, num_tokens=num_tokens, max_query_len=longest)

    def _compute(self, token_ids: np.ndarray, batch: Batch, logit_rows: np.ndarray) -> np.ndarray:
        inputs, rows, batch = jax.device_put((token_ids, logit_rows, batch), self._device)
        batch = replace(batch, logit_rows=rows, implementation=self.config.implementation)
        next_tokens, self._kv = self._steps.step(self._params, inputs, batch, self._kv)
        return np.asarray(next_tokens)

    def _accept(self, plan: StepPlan, next_tokens: np.ndarray) -> list[TokenEvent]:
        events = []
        for (sequence, count), token in zip(plan.counts, next_tokens.tolist(), strict=False):
            sequence.num_cached += count
            if sequence.num_cached < len(sequence.tokens):
                continue  # a chunk that ends inside the prompt
            sequence.tokens.append(token)
            is_end = token in self._eos_ids and not sequence.ignore_eos
            if is_end or len(sequence.tokens) == sequence.max_len:
                sequence.finish_reason = "stop" if is_end else "length"
            text = self._text(self._answers[sequence.request_id], token, is_end)
            events.append(TokenEvent(sequence.request_id, token, text, sequence.finish_reason))
        return events

    def _text(self, answer: _Answer, token: int, is_end: bool) -> str:
        if answer.stream is None:
            return ""
        text = "" if is_end else answer.stream.push(token)
        if answer.sequence.finish_reason is not None:
            text += answer.stream.finish()
        answer.text.append(text)
        return text

    def _release_finished(self, plan: StepPlan) -> None:
        finished = [sequence for sequence, _ in plan.counts if sequence.finish_reason is not None]
        if not finished:
            return
        mask = np.zeros(self.config.max_seqs, bool)
        for sequence in finished:
            mask[sequence.row] = True
            self._scheduler.finish(sequence)
            del self._answers[sequence.request_id]
        self._release(mask)

    def _release(self, mask: np.ndarray) -> None:
        self._tables, self._pool = self._steps.release(self._tables, self._pool, mask)

    def _empty_cache(self) -> tuple[BlockTables, PagePool, KVPages]:
        pages_per_seq = self.layout.pages_for(self.config.max_model_len)
        with jax.default_device(self._host):
            tables = block_tables.create(self.config.max_seqs, pages_per_seq)
            pool = page_pool.create(self.layout.num_pages)
        with jax.default_device(self._device):
            return tables, pool, KVPages.create(self.layout)


def _completion(answer: _Answer) -> Completion:
    sequence = answer.sequence
    assert sequence.finish_reason is not None
    return Completion(
        prompt_token_ids=sequence.tokens[: sequence.prompt_len],
        token_ids=sequence.tokens[sequence.prompt_len :],
        text="".join(answer.text),
        finish_reason=sequence.finish_reason,
    )


def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MissingBackendError(
            "the allocator runs on the host's CPU backend, which JAX was told not to start; set JAX_PLATFORMS=cuda,cpu "
            "(or tpu,cpu), or unset it"
        ) from error
