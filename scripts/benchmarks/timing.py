"""How the benchmarks take time: interleaved rounds, medians, steps of a model without an engine."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from models.registry import Checkpoint
from models.transformer import functional
from paged_jax import Batch, KVPages
from paged_jax import batch as batches
from paged_jax.layout import ceil_div
from paged_jax.steps import Model
from scripts.command_line import DTYPES

REPEATS = 5
"""Steps that one measurement runs one after another."""


def time_call(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleave[Case, Figure](runs: Mapping[Case, Callable[[], Figure]], rounds: int) -> dict[Case, list[Figure]]:
    """Runs every case once, to compile, and then `rounds` times in turn."""
    for run in runs.values():
        run()
    results: dict[Case, list[Figure]] = {case: [] for case in runs}
    for _ in tqdm(range(rounds), desc="rounds", disable=None, leave=False):
        for case, run in runs.items():
            results[case].append(run())
    return results


def medians[Case](runs: Mapping[Case, Callable[[], float]], rounds: int) -> dict[Case, float]:
    """The medians of interleaved rounds."""
    return {case: statistics.median(values) for case, values in interleave(runs, rounds).items()}


def timed_step(model: Model, params: Any, batch: Batch, make_kv: Callable[[], Any]) -> Callable[[], float]:
    """A function that runs a step several times, each greedy token read back, and returns its milliseconds.

    Args:
      model: the model contract.
      params: its parameters.
      batch: computed again and again.
      make_kv: makes the cache, anew for every measurement, so that many cases need not be held at once.
    """

    @partial(jax.jit, donate_argnums=3)
    def step(params: Any, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
        hidden, kv = model(params, token_ids, batch, kv)
        return jnp.argmax(model.logits(params, hidden[batch.logit_rows]), axis=-1).astype(jnp.int32), kv

    token_ids = jnp.zeros(batch.positions.shape, jnp.int32)

    def run() -> float:
        tokens, kv = step(params, token_ids, batch, make_kv())  # touches the new memory, and compiles the first time
        tokens.block_until_ready()
        started = time.perf_counter()
        for _ in range(REPEATS):
            tokens, kv = step(params, token_ids, batch, kv)
            tokens.block_until_ready()
        return (time.perf_counter() - started) / REPEATS * 1e3

    return run


def decode_batch(tables: Array, context: int, page_size: int) -> Batch:
    """One more token for rows that hold `context - 1`."""
    num_seqs = tables.shape[0]
    lens = jnp.full(num_seqs, context - 1, jnp.int32)
    return batches.decode(tables, lens, jnp.ones(num_seqs, jnp.int32), page_size=page_size)


def paged_step(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    num_seqs: int,
    context: int,
    page_size: int,
    chunk: int = 1,
    table_tokens: int = 0,
    pool_tokens: int = 0,
) -> Callable[[], float]:
    """`timed_step` over pages that lie scattered in the pool.

    Args:
      checkpoint: the model.
      dtype: of the pages.
      num_seqs: sequences of the batch.
      context: tokens of each that are cached once the step is written.
      page_size: tokens a page.
      chunk: tokens of each that the step computes.
      table_tokens: tokens that a row of the table has room for; 0 for `context`.
      pool_tokens: tokens that the pool has room for, for each sequence; 0 for `context`.
    """
    model = functional(checkpoint.config)
    owned, width, held = (ceil_div(max(context, tokens), page_size) for tokens in (0, table_tokens, pool_tokens))
    layout = model.kv_layout(num_pages=num_seqs * held + 1, page_size=page_size, dtype=DTYPES[dtype])
    page_ids = np.random.default_rng(0).permutation(np.arange(1, layout.num_pages, dtype=np.int32))
    tables = np.zeros((num_seqs, width), np.int32)
    tables[:, :owned] = page_ids[: num_seqs * owned].reshape(num_seqs, owned)
    if chunk == 1:
        batch = decode_batch(jnp.asarray(tables), context, page_size)
    else:
        batch = batches.ragged(
            jnp.asarray(tables),
            jnp.full(num_seqs, context - chunk, jnp.int32),
            jnp.full(num_seqs, chunk, jnp.int32),
            page_size=page_size,
            num_tokens=num_seqs * chunk,
            max_query_len=chunk,
        )
    return timed_step(model, checkpoint.params, batch, lambda: KVPages.create(layout))
