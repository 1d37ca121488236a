"""The engine: takes requests, runs them together out of one pool of pages, and gives their tokens as they come."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

import pallas_kernels
from paged_jax import answer as answers
from paged_jax import block_tables, page_pool
from paged_jax.admission import Admission
from paged_jax.answer import Answer, Needs
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.errors import MissingBackendError
from paged_jax.layout import KVLayout
from paged_jax.page_pool import PagePool
from paged_jax.request import Completion, Request, TokenEvent, Tokenizer
from paged_jax.sampling import LogitsProcessor
from paged_jax.scheduler import Scheduler, SequenceState, StepPlan
from paged_jax.stats import EngineStats
from paged_jax.steps import Extras, Model, StepOutput, Steps


class Engine:
    """Generates for many requests at once.

    A step compiles what its requests ask for: greedy tokens alone, drawn tokens or log probabilities (one program,
    whatever the parameters; greedy rows may stand among drawn ones), the same with the tokens so far, and each of
    these with the scores of prompts.

    The allocator's state (block tables and page pool) lives on the host's CPU device, the pages beside the
    parameters. A step that raises leaves no request lost: the pages are dropped, what ran goes back to the queue with
    its tokens, and the next step computes it anew.

    Args:
      model: the model contract (see `paged_jax.steps.Model`).
      params: its parameters.
      layout: geometry of the pages, their number included (see `paged_jax.budget.size_pool`).
      tokenizer: for prompts and answers as text; None for token ids alone.
      config: limits and choices.
      logits_processor: pure function `(logits float32 [rows, vocab], tokens int32 [rows, max_model_len]) -> logits`,
        compiled into every step; goes before penalty and temperature. `tokens` are the row's prompt and answer so far,
        padded with -1. -inf forbids a token; at least one must be left.

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
        *,
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.layout = layout
        self.stats = EngineStats(layout)
        self._params = params
        self._tokenizer = tokenizer
        (self._device,) = jax.tree.leaves(params)[0].devices()
        self._host = _cpu_device()
        self._steps = Steps(model, page_size=layout.page_size, logits_processor=logits_processor)
        self._always = Needs(sampling=logits_processor is not None, context=logits_processor is not None)
        self._admission = Admission(model, params, layout, tokenizer, self.config)
        self._scheduler = Scheduler(self.config, layout)
        self._answers: dict[SequenceState, Answer] = {}
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
        return self._admission.max_len

    def add_request(self, request: Request) -> int:
        """Queues a request and returns its id.

        Raises:
          ValueError: the prompt is empty, has a token outside the vocabulary or is text without a tokenizer, or there
            are stop strings without one.
          RequestTooLongError: the prompt leaves no room for a token, or max_tokens can never fit the pool.
        """
        return self._enqueue(self._checked(request))[0].sequence.request_id

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
            output = self._run(plan)
        except BaseException:
            # The donated pages are gone; what ran starts over from its tokens.
            self._tables, self._pool, self._kv = self._empty_cache()
            self._scheduler.requeue_running()
            raise
        elapsed = time.perf_counter() - started - (self._steps.compile_seconds - compiled)
        self.stats.record(plan, elapsed, self._steps)
        events = self._accept(plan, output)
        self._release_finished(plan)
        return events

    def generate(
        self,
        requests: Iterable[Request | str | Sequence[int]],
        *,
        on_token: Callable[[int, TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Runs requests to their end and returns the answers in the order of the requests; a request's n samples follow
        one another.

        Args:
          requests: requests; a bare prompt stands for `Request(prompt)`. All are checked before any of them runs.
          on_token: called as `on_token(index, event)` for every token, where index is the place in `requests`.

        Raises:
          ValueError, RequestTooLongError: a request is refused (see `add_request`); none has run.
        """
        checked = [self._checked(request if isinstance(request, Request) else Request(request)) for request in requests]
        queued = [self._enqueue(samples) for samples in checked]
        index = {samples[0].sequence.request_id: i for i, samples in enumerate(queued)}
        flat = [answer for samples in queued for answer in samples]
        while any(answer.sequence.finish_reason is None for answer in flat):
            for event in self.step():
                if on_token is not None and event.request_id in index:
                    on_token(index[event.request_id], event)
        return [answer.completion() for answer in flat]

    def score(self, token_ids: Sequence[int]) -> Float[np.ndarray, " scored"]:
        """Log probability of each token but the first, given all before it.

        The sequence is prefilled in chunks through the pages, which are given back; requests that were queued before
        run beside it.

        Args:
          token_ids: at least one token.

        Returns:
          float32 [len(token_ids) - 1].

        Raises:
          ValueError: no token, or one outside the vocabulary.
          RequestTooLongError: the sequence can never fit.
        """
        request = Request(token_ids, prompt_logprobs=True)
        tokens = self._admission.prompt(request)
        max_len = self._admission.scored_length(len(tokens))
        sequence = SequenceState(next(self._ids), tokens, len(tokens), max_len)
        (answer,) = self._enqueue([Answer(sequence, request, self._tokenizer)])
        while sequence.finish_reason is None:
            self.step()
        return answer.prompt_logprobs

    def warm_up(self, *like: Request) -> None:
        """Compiles every program that a run can need, so that none is compiled while requests wait.

        Args:
          like: requests that ask for what those of the run will (sampling, penalty, log probabilities; their prompts
            and values do not matter); none for greedy ones.
        """
        wanted = [self._union([answers.needs_of(request)]) for request in like] or [self._always]
        scored = {False} | {needs.prompt_logprobs for needs in wanted}
        programs = {needs._replace(prompt_logprobs=flag) for needs in wanted for flag in scored}
        sizes = [(size, 1, size) for size in self.config.decode_sizes]
        sizes += [(size, size, min(size, self.config.max_seqs)) for size in self.config.prefill_sizes]
        for num_tokens, longest, rows in sizes:
            counts = np.zeros(self.config.max_seqs, np.int32)
            _, _, batch, _, _ = self._append(counts, num_tokens, longest)
            for needs in programs:
                extras = self._extras(needs, [], num_tokens, rows)
                self._compute(np.zeros(num_tokens, np.int32), batch, np.zeros(rows, np.int32), extras)
        self._release(np.zeros(self.config.max_seqs, bool))

    def _checked(self, request: Request) -> list[Answer]:
        tokens = self._admission.prompt(request)
        max_len = self._admission.length(len(tokens), request.max_tokens)
        request_id = next(self._ids)
        samples = [SequenceState(request_id, list(tokens), len(tokens), max_len, child) for child in range(request.n)]
        return [Answer(sequence, request, self._tokenizer) for sequence in samples]

    def _enqueue(self, samples: list[Answer]) -> list[Answer]:
        for answer in samples:
            self._answers[answer.sequence] = answer
            self._scheduler.add(answer.sequence)
        return samples

    def _union(self, wanted: Iterable[Needs]) -> Needs:
        return Needs(*map(any, zip(self._always, *wanted, strict=True)))

    def _extras(self, needs: Needs, running: Sequence[tuple[Answer, int]], num_tokens: int, rows: int) -> Extras:
        return answers.extras(needs, running, num_tokens=num_tokens, rows=rows, max_len=self.config.max_model_len)

    def _run(self, plan: StepPlan) -> StepOutput:
        """Allocates, computes and returns, on the host, the next token of every sequence of the plan, in its order."""
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
        running = [(self._answers[sequence], count) for sequence, count in plan.counts]
        needs = self._union({answer.next_needs for answer, _ in running})
        extras = self._extras(needs, running, size, len(logit_rows))
        output = self._compute(token_ids, batch, logit_rows, extras)
        self._tables, self._pool = tables, pool
        return output

    def _append(self, counts: np.ndarray, num_tokens: int, longest: int) -> block_tables.Grown:
        return self._steps.append(self._tables, self._pool, counts, num_tokens=num_tokens, max_query_len=longest)

    def _compute(self, token_ids: np.ndarray, batch: Batch, logit_rows: np.ndarray, extras: Extras) -> StepOutput:
        inputs, rows, batch, extras = jax.device_put((token_ids, logit_rows, batch, extras), self._device)
        batch = replace(batch, logit_rows=rows, implementation=self.config.implementation)
        output, self._kv = self._steps.step(self._params, inputs, batch, self._kv, extras)
        return jax.device_get(output)

    def _accept(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        events = []
        start = 0
        for row, (sequence, count) in enumerate(plan.counts):
            answer = self._answers[sequence]
            if output.prompt_logprobs is not None:
                answer.take_prompt(np.asarray(output.prompt_logprobs[start : start + count]), sequence.num_cached)
            start += count
            sequence.num_cached += count
            if sequence.num_cached < len(sequence.tokens):
                continue  # a chunk that ends inside the prompt
            if len(sequence.tokens) == sequence.max_len:
                sequence.finish_reason = "length"  # only scored
            else:
                events.append(answer.take_token(output, row))
        return events

    def _release_finished(self, plan: StepPlan) -> None:
        finished = [sequence for sequence, _ in plan.counts if sequence.finish_reason is not None]
        if not finished:
            return
        mask = np.zeros(self.config.max_seqs, bool)
        for sequence in finished:
            mask[sequence.row] = True
            self._scheduler.finish(sequence)
            del self._answers[sequence]
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


def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MissingBackendError(
            "the allocator runs on the host's CPU backend, which JAX was told not to start; set JAX_PLATFORMS=cuda,cpu "
            "(or tpu,cpu), or unset it"
        ) from error
