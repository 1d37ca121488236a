"""The engine: takes requests, runs them together out of one pool of pages, and gives their tokens as they come."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

import pallas_kernels
from paged_jax import answer as answers
from paged_jax import outcome
from paged_jax.admission import Admission
from paged_jax.answer import Answer, Needs
from paged_jax.config import EngineConfig
from paged_jax.errors import EngineBusyError
from paged_jax.layout import KVLayout
from paged_jax.outcome import Outcome
from paged_jax.prefix import Namespace, PageKeys, PrefixMatch
from paged_jax.request import Completion, Request, TokenEvent, Tokenizer
from paged_jax.runner import Runner
from paged_jax.sampling import LogitsProcessor
from paged_jax.scheduler import Scheduler, StepPlan
from paged_jax.sequence import SequenceState
from paged_jax.stats import EngineMetrics, EngineStats, PageMap, live_pages, page_map, snapshot
from paged_jax.steps import Extras, Model, Steps
from paged_jax.streams import Streams


class Engine:
    """Generates for many requests at once.

    Requests are served first come first served, prompts in chunks beside the decoding of others. Full pages are named
    by what they hold, so that requests with the same beginning share pages and skip that part of their prefill; when
    pages run out the newest request is put back and computed again later. None of this changes an answer.

    A step compiles what its requests ask for: greedy tokens alone, drawn tokens or log probabilities (one program,
    whatever the parameters; greedy rows may stand among drawn ones), the same with the tokens so far, and each of
    these with the scores of prompts.

    A step that raises leaves no request lost: the pages are dropped, what ran goes back to the queue with its tokens,
    and the next step computes it anew. The methods may be called from several threads.

    Args:
      model: the model contract (see `paged_jax.steps.Model`).
      params: its parameters.
      layout: geometry of the pages, their number included (see `paged_jax.budget.size_pool`).
      tokenizer: for prompts and answers as text; None for token ids alone.
      config: limits and choices.
      logits_processor: pure function `(logits float32 [rows, vocab], tokens int32 [rows, max_model_len]) -> logits`
        that is compiled into every step and goes before penalty and temperature; `tokens` are the row's prompt and
        answer so far, padded with -1. -inf forbids a token; at least one must be left.

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
        steps = Steps(model, page_size=layout.page_size, config=self.config, logits_processor=logits_processor)
        self._runner = Runner(steps, params, layout, self.config)
        self._always = Needs(sampling=logits_processor is not None, context=logits_processor is not None)
        self._admission = Admission(model, params, layout, tokenizer, self.config)
        self._scheduler = Scheduler(self.config, layout)
        self._answers: dict[SequenceState, Answer] = {}
        self._requests: dict[int, list[SequenceState]] = {}
        self._next_id = 0
        self._lock = threading.RLock()
        self._streams = Streams(step=self.step, abort=self.abort, is_alive=self._requests.__contains__, lock=self._lock)

    @property
    def implementation(self) -> str:
        """The attention implementation in use, and why."""
        if self.config.implementation is not None:
            return f"{self.config.implementation} (asked for)"
        name = pallas_kernels.default_implementation()
        otherwise = "" if name == "xla" else ", or xla for a dtype or shape that it does not take"
        return f"{name}{otherwise} (default on {self._runner.device.platform})"

    @property
    def max_request_len(self) -> int:
        """Longest prompt and answer together, in tokens: what the context and the pool hold."""
        return self._admission.max_len

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running: `step` has nothing to do."""
        return not self._requests

    def add_request(self, request: Request | str | Sequence[int]) -> int:
        """Queues a request (a bare prompt stands for `Request(prompt)`) and returns its id.

        Raises:
          ValueError: the prompt is empty, has a token outside the vocabulary or is text without a tokenizer, or there
            are stop strings without one.
          RequestTooLongError: the prompt leaves no room for a token, or max_tokens can never fit the pool.
        """
        with self._lock:
            return self._enqueue(self._admission.samples(request))

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is, with finish_reason "abort", and gives its pages back; a finished one stays so.

        Raises:
          ValueError: the id was never given out.
        """
        with self._lock:
            if not 0 <= request_id < self._next_id:
                raise ValueError(f"request_id must be one that add_request gave, 0..{self._next_id - 1}: {request_id}")
            running = []
            for sequence in self._requests.pop(request_id, []):
                if sequence.finish_reason is not None:
                    continue
                self._answers.pop(sequence).end("abort")
                row = self._scheduler.abort(sequence)
                running += [] if row is None else [row]
            if running:
                self._runner.release(running)

    def step(self, *, max_steps: int = 1) -> list[TokenEvent]:
        """Computes one step and returns the tokens it made: none while only prompts are computed, and when `is_idle`.

        Decode steps may follow one another in one call of the device, which spares the host's work between them; the
        tokens are those of single steps, in the same order. That is done while every running request decodes, nobody
        who waits could be admitted before one of them ends (the call ends with it then), none has stop strings or
        more than 8 end tokens, no stream is open, and the pool has room for what they will write, cached pages that
        nobody uses given up.

        Args:
          max_steps: decode steps at most, up to `EngineConfig.decode_steps`. Meanwhile nothing can be added or aborted.

        Raises:
          ValueError: max_steps is out of range.
          Exception: whatever the model's step raised; no request is lost.
        """
        if not 1 <= max_steps <= self.config.decode_steps:
            raise ValueError(f"max_steps must be in 1..decode_steps = {self.config.decode_steps}, got {max_steps}")
        with self._lock:
            started, compiled = time.perf_counter(), self._runner.steps.compile_seconds
            max_steps = 1 if self._streams.any_open else max_steps
            plan = self._scheduler.plan(self._runner.num_free, self._runner.release_row, max_steps)
            if plan is None:
                return []
            for sequence in plan.admitted:
                self._answers[sequence].start()
            try:
                output = self._runner.run(plan, self._extras)
            except BaseException:
                # The donated pages are gone; what ran starts over from its tokens.
                self._scheduler.index.forget()
                self._scheduler.requeue_running()
                self._runner.reset()
                raise
            self._scheduler.commit(plan, self._runner.page_ids)
            forks = [(parent.placed_row, child.placed_row) for parent, children in plan.forked for child in children]
            if forks:
                self._runner.fork(forks)
            elapsed = time.perf_counter() - started - (self._runner.steps.compile_seconds - compiled)
            live = live_pages(self._scheduler, self._runner, self.layout)
            taken = outcome.take(plan, output, self._answers, self._scheduler, self._runner.page_ids)
            self.stats.record(plan, taken, elapsed, self._runner.steps, self._runner.seq_lens, live_pages=live)
            self._give_back(plan, taken)
            self._streams.deal(taken.events)
            return taken.events

    def generate(
        self,
        requests: Iterable[Request | str | Sequence[int]],
        *,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Runs requests to their end and returns the answers in the order of the requests; a request's n samples follow
        one another.

        Args:
          requests: requests; a bare prompt stands for `Request(prompt)`. All are checked before any of them runs.
          on_token: called as `on_token(index, event)` for every token, where index is the place in `requests`.
          on_step: called after every step, to look at the engine.

        Who gives neither waits for whole answers: decode steps then follow one another in one call of the device where
        they can (see `step`), `EngineConfig.decode_steps` at most.

        Raises:
          ValueError, RequestTooLongError: a request is refused (see `add_request`); none has run.
        """
        with self._lock:
            checked = [self._admission.samples(request) for request in requests]
            index = {self._enqueue(samples): i for i, samples in enumerate(checked)}
        flat = [answer for samples in checked for answer in samples]
        max_steps = self.config.decode_steps if on_token is None and on_step is None else 1
        while any(answer.sequence.finish_reason is None for answer in flat):
            for event in self.step(max_steps=max_steps):
                if on_token is not None and event.request_id in index:
                    on_token(index[event.request_id], event)
            if on_step is not None:
                on_step()
        return [answer.completion() for answer in flat]

    def stream(self, request: Request | str | Sequence[int]) -> Iterator[TokenEvent]:
        """Queues a request at once and gives its tokens as they come; other requests run beside it.

        Closing the iterator early aborts the request. A step that fails raises here, and the iterator ends; the request
        is aborted, others go on.

        Raises:
          ValueError, RequestTooLongError: the request is refused (see `add_request`).
        """
        return self._streams.tokens(self._open_stream(request))

    async def stream_async(self, request: Request | str | Sequence[int]) -> AsyncIterator[TokenEvent]:
        """As `stream`, for asyncio: steps run in a thread, and several streams share them.

        Raises:
          ValueError, RequestTooLongError: the request is refused (see `add_request`).
        """
        request_id = await asyncio.to_thread(self._open_stream, request)
        async for event in self._streams.tokens_async(request_id):
            yield event

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
        with self._lock:
            answer = self._admission.scored(token_ids)
            self._enqueue([answer])
        while answer.sequence.finish_reason is None:
            self.step()
        return answer.prompt_logprobs

    def explain_prefix(
        self, token_ids: Sequence[int], *, cache_salt: str | None = None, extra_keys: Sequence[str | bytes | int] = ()
    ) -> PrefixMatch:
        """How many leading tokens of a prompt are in cached pages now, and why the chain ends there."""
        keys = PageKeys(Namespace(cache_salt, tuple(extra_keys)), self.layout.page_size)
        with self._lock:
            return self._scheduler.index.explain(keys, token_ids)

    def reset_prefix_cache(self, *, force: bool = False) -> None:
        """Forgets all cached prefixes.

        Args:
          force: also while requests use some of them; they keep their pages, which no later request will share.

        Raises:
          EngineBusyError: requests use cached pages, and `force` is false.
        """
        with self._lock:
            index = self._scheduler.index
            in_use = len(index) - index.num_unused
            if in_use and not force:
                raise EngineBusyError(
                    f"running requests use {in_use} cached pages; let them finish, or give force=True"
                )
            self._runner.release_pages(index.forget())

    def update_params(self, params: Any, *, recompute: bool = False) -> None:
        """Takes other parameters of the same shapes; compiles nothing. Cached prefixes are forgotten.

        Args:
          params: the new parameters.
          recompute: put running requests back to the queue; they keep their tokens, whose keys and values are computed
            anew.

        Raises:
          ValueError: the tree, a shape or a dtype differs.
          EngineBusyError: requests are running, and `recompute` is false.
        """
        old, new = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (self._runner.params, params))
        if old != new:
            raise ValueError(
                "params must have the tree, shapes and dtypes of the parameters that the engine was made for"
            )
        with self._lock:
            if self._scheduler.running and not recompute:
                raise EngineBusyError(
                    f"{len(self._scheduler.running)} requests are running with the old parameters; let them finish, "
                    "abort them, or give recompute=True"
                )
            rows = self._scheduler.requeue_running()
            if rows:
                self._runner.release(rows)
            self._runner.release_pages(self._scheduler.index.forget())
            self._runner.params = params

    def metrics(self) -> EngineMetrics:
        """A snapshot of pages, prefix hits, queues and compilations."""
        with self._lock:
            return snapshot(self._scheduler, self._runner, self.layout)

    def page_map(self) -> PageMap:
        """Which requests use which pages now."""
        with self._lock:
            return page_map(self._scheduler, self._runner)

    def memory_stats(self) -> dict[str, int]:
        """What JAX reports of the device's memory, in bytes; a CPU reports nothing."""
        return self._runner.device.memory_stats() or {}

    def warm_up(self, *like: Request) -> None:
        """Compiles every program that a run can need, so that none is compiled while requests wait.

        Args:
          like: requests that ask for what those of the run will (sampling, penalty, log probabilities; their prompts
            and values do not matter); none for greedy ones.
        """
        wanted = [self._union([answers.needs_of(request)]) for request in like] or [self._always]
        scored = {False} | {needs.prompt_logprobs for needs in wanted}
        programs = {needs._replace(prompt_logprobs=flag) for needs in wanted for flag in scored}
        sizes = [(size, True) for size in self.config.decode_sizes]
        sizes += [(size, False) for size in self.config.prefill_sizes]
        with self._lock:
            for size, is_decode in sizes:
                for needs in programs:
                    extras = self._make_extras(needs, [], size, min(size, self.config.max_seqs))
                    self._runner.compile(size, extras, is_decode=is_decode)
            self._runner.compile_metadata()

    def _enqueue(self, samples: list[Answer]) -> int:
        request_id, self._next_id = self._next_id, self._next_id + 1
        for answer in samples:
            answer.sequence.request_id = request_id
            self._answers[answer.sequence] = answer
        self._requests[request_id] = [answer.sequence for answer in samples]
        self._scheduler.add(samples[0].sequence)
        return request_id

    def _open_stream(self, request: Request | str | Sequence[int]) -> int:
        with self._lock:
            request_id = self.add_request(request)
            self._streams.open(request_id)
            return request_id

    def _union(self, wanted: Iterable[Needs]) -> Needs:
        return Needs(*map(any, zip(self._always, *wanted, strict=True)))

    def _extras(self, rows: Sequence[tuple[SequenceState, int]], num_tokens: int, num_rows: int) -> Extras:
        needs = self._union({self._answers[sequence].next_needs for sequence, count in rows if count})
        running = [(self._answers[sequence], count) for sequence, count in rows] if any(needs) else []
        return self._make_extras(needs, running, num_tokens, num_rows)

    def _make_extras(
        self, needs: Needs, running: Sequence[tuple[Answer, int]], num_tokens: int, num_rows: int
    ) -> Extras:
        return answers.extras(needs, running, num_tokens=num_tokens, rows=num_rows, max_len=self.config.max_model_len)

    def _give_back(self, plan: StepPlan, taken: Outcome) -> None:
        """Releases the rows of sequences that ended, pages that others took ahead in vain, and those behind the
        window."""
        lens = {}
        if plan.num_steps > 1:
            lens = {sequence.placed_row: sequence.num_cached for sequence, _ in plan.counts}
        lens |= {self._scheduler.finish(sequence): 0 for sequence in taken.ended}
        if taken.published or taken.ended:
            self._runner.settle(taken.published, lens)
        for sequence in taken.ended:
            del self._answers[sequence]
        for request_id in {sequence.request_id for sequence in taken.ended}:
            if all(sequence.finish_reason is not None for sequence in self._requests[request_id]):
                del self._requests[request_id]
        if self.config.sliding_window is not None:
            first_pages = self._scheduler.behind_window(self.config.sliding_window)
            if first_pages:
                self._runner.release_before(first_pages)
