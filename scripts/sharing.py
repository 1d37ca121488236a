"""Pages saved by pointing at the same ones: n samples, beams and prefixes, with this package's page pool and tables.

No model: some requests run side by side from their first token to their last, and in every step the live pages are
counted beside those that the same sequences would take if each had its own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax import block_tables, page_pool
from paged_jax.block_tables import BlockTables
from paged_jax.layout import ceil_div
from paged_jax.page_pool import PagePool
from scripts.lengths import Lengths

REPLACED = 0.1
"""Share of the beams that each step drops for another continuation of one of the request's beams: an assumption, which
decides how soon beams have a common past."""

State = tuple[BlockTables, PagePool]


class Sharing:
    """Requests side by side. The largest width and prefix fix all shapes, so that everything compiles once.

    Args:
      requests: what runs.
      page_size: tokens a page.
      max_width: most samples or beams of a request.
      max_prefix: longest prefix.
    """

    def __init__(self, requests: Sequence[Lengths], *, page_size: int, max_width: int, max_prefix: int) -> None:
        self._requests, self._page_size = requests, page_size
        self._rows = len(requests) * max_width
        self._pages_per_seq = ceil_div(max_prefix + max(request.total for request in requests), page_size)
        self._steps = max(request.output for request in requests)
        self._prompt_tokens = max_prefix + sum(max_prefix + request.prompt for request in requests)

    def samples(self, n: int, *, beams: bool = False, seed: int = 0) -> float:
        """Share of the pages saved when every request has `n` samples of its full length.

        Args:
          n: samples of each, at most max_width.
          beams: they are beams: in each step a tenth of them (`REPLACED`) give way to copies of others.
          seed: which give way.
        """
        first = np.arange(len(self._requests)) * n
        used = len(self._requests) * n
        prompts = self._per_row([0] * used)
        prompts[first] = [request.prompt for request in self._requests]
        src = np.repeat(first, n)
        outputs = self._per_row([request.output for request in self._requests for _ in range(n)])
        parents = np.tile(np.arange(self._rows, dtype=np.int32), (self._steps, 1))
        if beams:
            rng = np.random.default_rng(seed)
            others = src + rng.integers(0, n, (self._steps, used))
            replaced = rng.random(others.shape) < REPLACED
            parents[:, :used] = np.where(replaced, others, parents[:, :used])
        state = self._fork(self._append(self._create(), prompts), src, np.arange(used))
        return self._saved(state, outputs, parents)

    def prefix(self, length: int) -> float:
        """Share of the pages saved when the prompts of all requests begin with the same `length` further tokens, at
        most max_prefix.

        They share its full pages, which stay cached until the last request ends.
        """
        shared = length // self._page_size * self._page_size
        tables, pool = self._append(self._create(), self._per_row([shared]))
        pool = page_pool.retain(pool, tables.page_ids[0])  # as the prefix index does
        others = np.arange(1, len(self._requests))
        state = self._fork((tables, pool), np.zeros_like(others), others)
        state = self._append(state, self._per_row([length - shared + request.prompt for request in self._requests]))
        parents = np.tile(np.arange(self._rows, dtype=np.int32), (self._steps, 1))
        return self._saved(state, self._per_row([request.output for request in self._requests]), parents)

    def _per_row(self, values: Sequence[int]) -> np.ndarray:
        return np.array([*values, *[0] * (self._rows - len(values))], np.int32)

    def _create(self) -> State:
        tables = block_tables.create(self._rows, self._pages_per_seq)
        return tables, page_pool.create(self._rows * self._pages_per_seq + 1)

    def _append(self, state: State, counts: np.ndarray) -> State:
        state, ok = _append(state, counts, page_size=self._page_size, num_tokens=self._prompt_tokens)
        assert ok, "the pool holds every sequence in full"
        return state

    def _fork(self, state: State, src: np.ndarray, dst: np.ndarray) -> State:
        pairs = np.full((2, self._rows), -1, np.int32)
        pairs[:, : len(src)] = src, dst
        return _fork(state, *pairs)

    def _saved(self, state: State, outputs: np.ndarray, parents: np.ndarray) -> float:
        ok, live, alone = _decode(state, outputs, parents, page_size=self._page_size)
        assert ok.all(), "the pool holds every sequence in full"
        return 1 - int(np.asarray(live, np.int64).sum()) / int(np.asarray(alone, np.int64).sum())


@partial(jax.jit, static_argnames=("page_size", "num_tokens"))
def _append(state: State, counts: Array, *, page_size: int, num_tokens: int) -> tuple[State, Array]:
    tables, pool, _, _, ok = block_tables.append(*state, counts, page_size=page_size, num_tokens=num_tokens)
    return (tables, pool), ok


@jax.jit
def _fork(state: State, src: Array, dst: Array) -> State:
    return block_tables.fork(*state, src, dst)


@partial(jax.jit, static_argnames="page_size")
def _decode(state: State, outputs: Array, parents: Array, *, page_size: int) -> tuple[Array, Array, Array]:
    """Takes parents[step] and a token for each row that has not got its outputs yet, and empties the others; for each
    step ok, the live pages, and those of the rows counted one by one."""

    def step(state: State, inputs: tuple[Array, Array]) -> Any:
        index, parents = inputs
        state = block_tables.release(*state, index >= outputs)
        state = block_tables.reorder(*state, parents)
        tables, pool, _, _, ok = block_tables.append_decode(*state, index < outputs, page_size=page_size)
        live = jnp.int32(pool.num_pages - 1) - pool.num_free
        return (tables, pool), (ok, live, ceil_div(tables.seq_lens, page_size).sum(dtype=jnp.int32))

    return jax.lax.scan(step, state, (jnp.arange(parents.shape[0], dtype=jnp.int32), parents))[1]
