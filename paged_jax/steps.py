"""The compiled programs of an engine: its only jax.jit, so that compilations can be counted and timed."""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from paged_jax import batch, block_tables, cache, decode, page_pool, sampling
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables, PageCopies
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.decode import DecodeRows
from paged_jax.layout import NULL_PAGE, KVLayout
from paged_jax.page_pool import PagePool
from paged_jax.sampling import LogitsProcessor, Logprobs, SamplingArrays

_SCORED_ROWS = 64
"""Rows whose logits exist at once while a prompt is scored."""


@runtime_checkable
class Model(Protocol):
    """What an engine needs of a model; anything else it has is its own business.

    `params` is any pytree of arrays. In each layer the model calls `attention.write_kv` and `attention.attend`.
    """

    def __call__(
        self, params: Any, token_ids: Int32[Array, " num_tokens"], batch: Batch, kv: Any
    ) -> tuple[Float[Array, "num_tokens hidden"], Any]:
        """Hidden states of all tokens, and kv with this step's keys and values written."""
        ...

    def logits(self, params: Any, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Logits of the rows given."""
        ...


class Extras(NamedTuple):
    """What a step is asked for beyond greedy tokens. Which parts are there is static: it changes the program.

    Attributes:
      sampling: parameters of the rows; without them tokens are greedy and have no log probabilities.
      context: int32 [rows, max_len], each row's tokens so far padded with -1, for the repetition penalty and the logits
        processor; needs `sampling`.
      targets: int32 [num_tokens], the tokens whose log probabilities are wanted, one for each token of the step.
    """

    sampling: SamplingArrays | None = None
    context: Any = None
    targets: Any = None


class StepOutput(NamedTuple):
    """What a step gives beside the pages; a program gives it with an axis of steps before the others.

    Attributes:
      tokens: int32 [rows], the next token after each of the batch's logit_rows.
      logprobs: of these tokens, if the step had sampling parameters.
      prompt_logprobs: float32 [num_tokens], of the targets, if the step had any.
    """

    tokens: Array
    logprobs: Logprobs | None = None
    prompt_logprobs: Array | None = None


class PageUpdates(NamedTuple):
    """What the prefix index asks of the pool in a step; lists of static length, padded.

    Attributes:
      evicted: int32 [n], pages that it has forgotten, padded with the null page; released before pages are taken.
      published_rows, published_pages: int32 [m], rows and logical pages of the table that it will name, padded with -1;
        retained once pages are taken.
    """

    evicted: np.ndarray
    published_rows: np.ndarray
    published_pages: np.ndarray

    @classmethod
    def none(cls, num_tokens: int, max_seqs: int, page_size: int) -> "PageUpdates":
        """Empty lists that are long enough for any step of `num_tokens` tokens."""
        filled = num_tokens // page_size + max_seqs  # a page a sequence may have been filled to the last token before
        return cls(
            np.full(filled + max_seqs, NULL_PAGE, np.int32),
            np.full(filled, -1, np.int32),
            np.full(filled, -1, np.int32),
        )


Reserved = tuple[BlockTables, PagePool, PageCopies, Bool[Array, ""]]


class Steps:
    """Programs by shape, compiled on first use.

    Args:
      model: the model contract.
      page_size: tokens a page.
      config: gives decode_steps and implementation.
      logits_processor: goes over the logits of every step before a token is chosen; None for none.

    Attributes:
      num_compilations: programs compiled so far.
      compile_seconds: time that took.
    """

    def __init__(
        self, model: Model, *, page_size: int, config: EngineConfig, logits_processor: LogitsProcessor | None = None
    ) -> None:
        self._model = model
        self._config = config
        self._logits_processor = logits_processor
        self._page_size = page_size
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.num_compilations = 0
        self.compile_seconds = 0.0

    def append(
        self,
        tables: BlockTables,
        pool: PagePool,
        counts: Int32[np.ndarray, " max_seqs"],
        rereads: Int32[np.ndarray, " max_seqs"],
        updates: PageUpdates,
        *,
        num_tokens: int,
    ) -> block_tables.Grown:
        """`block_tables.append` for the whole batch at once, between the releases and the references of the index."""
        function = partial(_append, page_size=self._page_size, num_tokens=num_tokens, max_query_len=num_tokens)
        return self._run(("append", num_tokens), function, (tables, pool, counts, rereads, updates))

    def reserve(
        self, tables: BlockTables, pool: PagePool, counts: Int32[np.ndarray, " max_seqs"], updates: PageUpdates
    ) -> Reserved:
        """As `append`, without a batch: room for up to `decode_steps` more tokens of each sequence."""
        function = partial(_reserve, page_size=self._page_size, decode_steps=self._config.decode_steps)
        return self._run("reserve", function, (tables, pool, counts, updates))

    def settle(
        self, tables: BlockTables, pool: PagePool, lens: Int32[np.ndarray, " max_seqs"], updates: PageUpdates
    ) -> tuple[BlockTables, PagePool]:
        """What is left to do with the pages once a step has given its tokens: `updates` (nothing is evicted), and then
        `block_tables.truncate`."""
        return self._run("settle", partial(_settle, page_size=self._page_size), (tables, pool, lens, updates))

    def release_before(
        self, tables: BlockTables, pool: PagePool, first_pages: Int32[np.ndarray, " max_seqs"]
    ) -> tuple[BlockTables, PagePool]:
        """`block_tables.release_before`."""
        return self._run("release_before", block_tables.release_before, (tables, pool, first_pages))

    def release_pages(self, pool: PagePool, page_ids: Int32[np.ndarray, " n"]) -> PagePool:
        """`page_pool.release`."""
        return self._run("release_pages", page_pool.release, (pool, page_ids))

    def adopt(
        self,
        tables: BlockTables,
        pool: PagePool,
        row: np.int32,
        page_ids: Int32[np.ndarray, " pages_per_seq"],
        seq_len: np.int32,
    ) -> tuple[BlockTables, PagePool]:
        """`block_tables.adopt`."""
        return self._run("adopt", block_tables.adopt, (tables, pool, row, page_ids, seq_len))

    def fork(
        self, tables: BlockTables, pool: PagePool, src: Int32[np.ndarray, " n"], dst: Int32[np.ndarray, " n"]
    ) -> tuple[BlockTables, PagePool]:
        """`block_tables.fork`."""
        return self._run("fork", block_tables.fork, (tables, pool, src, dst))

    def copy_pages(self, kv: KVPages, copies: PageCopies) -> KVPages:
        """`cache.copy_pages`. Donates kv."""
        return self._run("copy_pages", cache.copy_pages, (kv, copies), donate=0)

    def step(
        self,
        params: Any,
        token_ids: Int32[np.ndarray, " num_tokens"],
        work: Batch | DecodeRows,
        kv: KVPages,
        extras: Extras = Extras(),  # noqa: B008 (immutable)
    ) -> tuple[StepOutput, KVPages]:
        """One model step and the token after each of `work.logit_rows`, or decode steps one after another (see
        `decode.loop`). The output has an axis of steps before the others. Donates kv. What is on the host is moved by
        the call itself: `jax.device_put` costs more than the rest of a dispatch."""
        if isinstance(work, DecodeRows):
            function = partial(_decode, self._model, self._logits_processor, self._config, self._page_size)
            key: tuple[Hashable, ...] = ("decode", work.limits.shape)
        else:
            function = partial(_one_step, self._model, self._logits_processor)
            shapes = (work.positions.shape, work.logit_rows.shape, work.max_query_len, work.implementation)
            key = ("step", *shapes)
        key = (*key, *(part is None for part in extras))
        return self._run(key, function, (params, token_ids, work, kv, extras), donate=3)

    def _run(
        self, key: Hashable, function: Callable[..., Any], args: tuple[Any, ...], *, donate: int | None = None
    ) -> Any:
        program = self._programs.get(key)
        if program is None:
            start = time.perf_counter()
            program = jax.jit(function, donate_argnums=() if donate is None else donate).lower(*args).compile()
            self._programs[key] = program
            self.num_compilations += 1
            self.compile_seconds += time.perf_counter() - start
        return program(*args)


def _append(
    tables: BlockTables,
    pool: PagePool,
    counts: Array,
    rereads: Array,
    updates: PageUpdates,
    *,
    page_size: int,
    num_tokens: int,
    max_query_len: int,
) -> block_tables.Grown:
    pool = page_pool.release(pool, jnp.asarray(updates.evicted))
    tables, pool, batch, copies, ok = block_tables.append(
        tables, pool, counts, page_size=page_size, num_tokens=num_tokens, max_query_len=max_query_len, rereads=rereads
    )
    return tables, _retain_published(tables, pool, updates, ok), batch, copies, ok


def _reserve(
    tables: BlockTables, pool: PagePool, counts: Array, updates: PageUpdates, *, page_size: int, decode_steps: int
) -> Reserved:
    tables, pool, _, copies, ok = _append(
        tables,
        pool,
        counts,
        jnp.zeros_like(counts),
        updates,
        page_size=page_size,
        num_tokens=counts.shape[0] * decode_steps,
        max_query_len=decode_steps,
    )
    return tables, pool, copies, ok


def _settle(
    tables: BlockTables, pool: PagePool, lens: Array, updates: PageUpdates, *, page_size: int
) -> tuple[BlockTables, PagePool]:
    pool = _retain_published(tables, pool, updates, jnp.bool_(True))
    return block_tables.truncate(tables, pool, lens, page_size=page_size)


def _retain_published(tables: BlockTables, pool: PagePool, updates: PageUpdates, ok: Array) -> PagePool:
    named = tables.page_ids[updates.published_rows, updates.published_pages]
    return page_pool.retain(pool, jnp.where(ok & (updates.published_rows >= 0), named, NULL_PAGE))


def vocab_size(model: Model, params: Any, layout: KVLayout) -> int:
    """Width of the model's logits, found without computing anything."""

    def logits(params: Any, token_ids: Array, batch: Batch, kv: KVPages) -> Array:
        return model.logits(params, model(params, token_ids, batch, kv)[0])

    token_ids, batch, kv = _step_shapes(layout, max_seqs=1, pages_per_seq=1, num_tokens=1, longest=1)
    return jax.eval_shape(logits, params, token_ids, batch, kv).shape[-1]


def temporary_bytes(model: Model, params: Any, layout: KVLayout, config: EngineConfig) -> int:
    """Peak temporary memory of the largest prefill and decode steps, sampling and scoring included, from the compiler;
    nothing runs."""
    max_seqs, longest = config.max_seqs, config.max_tokens_per_step
    pages_per_seq = layout.pages_for(config.max_model_len)
    sampled, context = sampling.pack([], max_seqs), jax.ShapeDtypeStruct((max_seqs, config.max_model_len), jnp.int32)
    token_ids, batch, kv = _step_shapes(
        layout, max_seqs=max_seqs, pages_per_seq=pages_per_seq, num_tokens=longest, longest=longest
    )
    batch = replace(batch, implementation=config.implementation)
    prefill = jax.jit(partial(_one_step, model, None), donate_argnums=3)
    decode_ = jax.jit(partial(_decode, model, None, config, layout.page_size), donate_argnums=3)
    programs = (
        prefill.lower(params, token_ids, batch, kv, Extras(sampled, context, token_ids)),
        decode_.lower(params, *_decode_shapes(max_seqs, pages_per_seq), kv, Extras(sampled, context)),
    )
    peak = 0
    for program in programs:
        analysis = program.compile().memory_analysis()
        assert analysis is not None, "the compiler of this backend does not say how much memory a step takes"
        peak = max(peak, analysis.temp_size_in_bytes)
    return peak


def _decode_shapes(rows: int, pages_per_seq: int) -> Any:
    """Shapes of (token_ids, work) of decode steps."""
    work = decode.no_rows(rows, pages_per_seq)
    return jax.eval_shape(lambda: (work.limits, work))


def _step_shapes(layout: KVLayout, *, max_seqs: int, pages_per_seq: int, num_tokens: int, longest: int) -> Any:
    """Shapes of (token_ids, batch, kv)."""
    batch_shapes = jax.eval_shape(
        partial(batch.ragged, page_size=layout.page_size, num_tokens=num_tokens, max_query_len=longest),
        jax.ShapeDtypeStruct((max_seqs, pages_per_seq), jnp.int32),
        *[jax.ShapeDtypeStruct((max_seqs,), jnp.int32)] * 2,
    )
    return (
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        batch_shapes,
        jax.eval_shape(lambda: KVPages.create(layout)),
    )


def _decode(
    model: Model,
    processor: LogitsProcessor | None,
    config: EngineConfig,
    page_size: int,
    params: Any,
    token_ids: Array,
    rows: DecodeRows,
    kv: KVPages,
    extras: Extras,
) -> tuple[StepOutput, KVPages]:
    return decode.loop(
        partial(_step, model, processor),
        params,
        token_ids,
        rows,
        kv,
        extras,
        page_size=page_size,
        max_steps=config.decode_steps,
        implementation=config.implementation,
    )


def _one_step(*args: Any) -> tuple[StepOutput, KVPages]:
    """`_step`, its output with the axis of steps that those of `_decode` have."""
    output, kv = _step(*args)
    return jax.tree.map(lambda x: x[None], output), kv


def _step(
    model: Model,
    processor: LogitsProcessor | None,
    params: Any,
    token_ids: Array,
    batch: Batch,
    kv: KVPages,
    extras: Extras,
) -> tuple[StepOutput, KVPages]:
    hidden, kv = model(params, token_ids, batch, kv)
    logits = model.logits(params, hidden[batch.logit_rows])
    scores = None if extras.targets is None else _score(model, params, hidden, extras.targets)
    if extras.sampling is None:
        return StepOutput(sampling.greedy(logits), None, scores), kv
    raw = logits = logits.astype(jnp.float32)
    if extras.context is not None:
        if processor is not None:
            logits = processor(logits, extras.context)
        logits = sampling.penalise(logits, extras.context, extras.sampling.repetition_penalty)
    tokens = sampling.sample(logits, extras.sampling, batch.positions[batch.logit_rows] + 1)
    return StepOutput(tokens, sampling.logprobs(raw, tokens, extras.sampling.top_logprobs), scores), kv


def _score(model: Model, params: Any, hidden: Array, targets: Array) -> Array:
    """Log probability of each token's target, a few rows of logits at a time."""
    num_tokens = targets.shape[0]
    rows = min(_SCORED_ROWS, num_tokens)
    padding = -num_tokens % rows

    def block(part: tuple[Array, Array]) -> Array:
        logits = model.logits(params, part[0]).astype(jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), part[1][:, None], axis=1)[:, 0]

    blocks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, rows, hidden.shape[1]),
        jnp.pad(targets, (0, padding)).reshape(-1, rows),
    )
    return lax.map(block, blocks).reshape(-1)[:num_tokens]
