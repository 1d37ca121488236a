"""The compiled programs of an engine: its only jax.jit, so that compilations can be counted and timed."""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from paged_jax import batch, block_tables, sampling
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables
from paged_jax.cache import KVPages
from paged_jax.config import EngineConfig
from paged_jax.layout import KVLayout
from paged_jax.page_pool import PagePool


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


class Steps:
    """Programs by shape, compiled on first use.

    Attributes:
      num_compilations: programs compiled so far.
      compile_seconds: time that took.
    """

    def __init__(self, model: Model, *, page_size: int) -> None:
        self._model = model
        self._page_size = page_size
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.num_compilations = 0
        self.compile_seconds = 0.0

    def append(
        self,
        tables: BlockTables,
        pool: PagePool,
        counts: Int32[np.ndarray, " max_seqs"],
        *,
        num_tokens: int,
        max_query_len: int,
    ) -> block_tables.Grown:
        """`block_tables.append`, for the whole batch at once."""
        function = partial(
            block_tables.append, page_size=self._page_size, num_tokens=num_tokens, max_query_len=max_query_len
        )
        return self._run(("append", num_tokens, max_query_len), function, (tables, pool, counts))

    def release(
        self, tables: BlockTables, pool: PagePool, mask: Bool[np.ndarray, " max_seqs"]
    ) -> tuple[BlockTables, PagePool]:
        """`block_tables.release`."""
        return self._run("release", block_tables.release, (tables, pool, mask))

    def step(
        self, params: Any, token_ids: Int32[Array, " num_tokens"], batch: Batch, kv: KVPages
    ) -> tuple[Int32[Array, " rows"], KVPages]:
        """One model step: the greedy token after each of `batch.logit_rows`. Donates kv."""
        key = ("step", batch.positions.shape, batch.logit_rows.shape, batch.max_query_len, batch.implementation)
        return self._run(key, partial(_step, self._model), (params, token_ids, batch, kv), donate=3)

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


def temporary_bytes(model: Model, params: Any, layout: KVLayout, config: EngineConfig) -> int:
    """Peak temporary memory of the largest prefill and decode steps, from the compiler; nothing runs."""
    pages_per_seq = layout.pages_for(config.max_model_len)
    kv = jax.eval_shape(lambda: KVPages.create(layout))
    peak = 0
    for num_tokens, longest in ((config.max_tokens_per_step, config.max_tokens_per_step), (config.max_seqs, 1)):
        shapes = jax.eval_shape(
            partial(batch.ragged, page_size=layout.page_size, num_tokens=num_tokens, max_query_len=longest),
            jax.ShapeDtypeStruct((config.max_seqs, pages_per_seq), jnp.int32),
            *[jax.ShapeDtypeStruct((config.max_seqs,), jnp.int32)] * 2,
        )
        shapes = replace(shapes, implementation=config.implementation)
        token_ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
        lowered = jax.jit(partial(_step, model), donate_argnums=3).lower(params, token_ids, shapes, kv)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None, "the compiler of this backend does not say how much memory a step takes"
        peak = max(peak, analysis.temp_size_in_bytes)
    return peak


def _step(model: Model, params: Any, token_ids: Array, batch: Batch, kv: KVPages) -> tuple[Array, KVPages]:
    hidden, kv = model(params, token_ids, batch, kv)
    return sampling.greedy(model.logits(params, hidden[batch.logit_rows])), kv
