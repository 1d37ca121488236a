"""The rival: the same model over a plain contiguous cache, every sequence with room for the longest context.

For each layer the cache holds keys and values [num_seqs, num_kv_heads, max_len, head_dim].
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from models.config import TransformerConfig
from models.registry import Checkpoint
from models.transformer import functional
from paged_jax import Batch
from paged_jax import batch as batches
from scripts.benchmarks.timing import decode_batch, timed_step
from scripts.command_line import DTYPES


def create(config: TransformerConfig, num_seqs: int, max_len: int, dtype: DTypeLike) -> Any:
    """A zeroed cache."""
    shape = (num_seqs, config.num_kv_heads, max_len, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    kv: Any,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    bound: int | None = None,
) -> tuple[Array, Any]:
    """Writes and attends for one token of each row, over the first `bound` places of the cache, or all."""
    keys, values = kv[layer]
    row = jnp.arange(q.shape[0])
    keys = keys.at[row, :, batch.positions].set(k)
    values = values.at[row, :, batch.positions].set(v)
    seen = (keys[:, :, :bound], values[:, :, :bound])
    out = _attend(q[:, None], *seen, batch.positions[:, None], scale, sliding_window, logit_soft_cap)
    return out[:, 0], (*kv[:layer], (keys, values), *kv[layer + 1 :])


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    kv: Any,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> tuple[Array, Any]:
    """Writes and attends for one whole prompt, of the row `batch.block_tables[0, 0]`."""
    keys, values = kv[layer]
    own_keys, own_values = (jnp.moveaxis(x, 0, 1)[None] for x in (k, v))
    start = (batch.block_tables[0, 0], *[jnp.int32(0)] * 3)
    keys = jax.lax.dynamic_update_slice(keys, own_keys, start)
    values = jax.lax.dynamic_update_slice(values, own_values, start)
    positions = jnp.arange(q.shape[0], dtype=jnp.int32)[None]
    out = _attend(q[None], own_keys, own_values, positions, scale, sliding_window, logit_soft_cap)
    return out[0], (*kv[:layer], (keys, values), *kv[layer + 1 :])


def _attend(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> Array:
    """q[b, t, heads, d] at positions[b, t] over keys and values [b, kv_heads, s, d]."""
    b, t, heads, head_dim = q.shape
    kv_heads, s = keys.shape[1:3]
    # One axis of queries for each KV head: XLA:CPU computes products of two slowly, in bfloat16 not at all.
    queries = jnp.moveaxis(q.reshape(b, t, kv_heads, -1, head_dim), 1, 2).reshape(b, kv_heads, -1, head_dim)
    logits = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32) * scale
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    place, query = jnp.arange(s), jnp.repeat(positions, heads // kv_heads, axis=1)[:, :, None]
    visible = place <= query
    if sliding_window is not None:
        visible &= place > query - sliding_window
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bkqs,bksd->bkqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out.reshape(b, kv_heads, t, -1, head_dim), 2, 1).reshape(q.shape).astype(q.dtype)


def contiguous_step(
    checkpoint: Checkpoint, dtype: str, *, num_seqs: int, context: int, max_len: int
) -> Callable[[], float]:
    """`timed_step` of a decode step; the attention goes over all that is reserved."""
    # Unrolled: a loop over layers would have to slice, and so copy, a stacked cache.
    model = functional(checkpoint.config, attention=decode_attention, unroll_layers=True)
    batch = decode_batch(jnp.zeros((num_seqs, 1), jnp.int32), context, max_len)
    return timed_step(
        model, checkpoint.params, batch, lambda: create(checkpoint.config, num_seqs, max_len, DTYPES[dtype])
    )


class ContiguousServer:
    """Greedy continuous batching over a contiguous cache: a request takes a row as soon as one is free.

    Prompts are padded to powers of two; a decode step attends over the smallest power of two that holds the longest
    running sequence, so neither compiles for every length.

    Args:
      checkpoint: the model.
      num_seqs: rows.
      max_len: places that each reserves.
      dtype: of the cache.
    """

    def __init__(self, checkpoint: Checkpoint, *, num_seqs: int, max_len: int, dtype: DTypeLike) -> None:
        self._checkpoint, self._max_len = checkpoint, max_len
        self._num_seqs, self._dtype = num_seqs, dtype
        self._prefill = self._program(prefill_attention)
        self._decode = {
            bound: self._program(partial(decode_attention, bound=bound)) for bound in _powers_of_two(max_len)
        }

    def generate(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """Answers to (prompt, tokens to generate), in their order."""
        kv = create(self._checkpoint.config, self._num_seqs, self._max_len, self._dtype)
        answers: list[list[int]] = [[] for _ in requests]
        queue, free_rows = deque(range(len(requests))), list(range(self._num_seqs))
        running: dict[int, int] = {}  # row -> request
        last, lens = np.zeros((2, self._num_seqs), np.int32)
        table = jnp.zeros((self._num_seqs, 1), jnp.int32)

        def take(row: int) -> None:
            index = running[row]
            answers[index].append(int(last[row]))
            if len(answers[index]) == requests[index][1]:
                del running[row]
                free_rows.append(row)
                lens[row] = 0

        while queue or running:
            while queue and free_rows:
                row = free_rows.pop()
                running[row] = index = queue.popleft()
                kv, last[row] = self._prompt(kv, row, requests[index][0])
                lens[row] = len(requests[index][0])
                take(row)
            if not running:
                break
            bound = next(bound for bound in self._decode if bound > lens.max())
            batch = batches.decode(table, jnp.asarray(lens), jnp.ones(lens.shape, jnp.int32), page_size=self._max_len)
            tokens, kv = self._decode[bound](self._checkpoint.params, jnp.asarray(last), batch, kv)
            last = np.array(tokens)
            lens[list(running)] += 1
            for row in list(running):
                take(row)
        return answers

    def _prompt(self, kv: Any, row: int, prompt: Sequence[int]) -> tuple[Any, int]:
        size = next(size for size in self._decode if size >= len(prompt))
        token_ids = np.zeros(size, np.int32)
        token_ids[: len(prompt)] = prompt
        count = jnp.array([len(prompt)], jnp.int32)
        table = jnp.array([[row]], jnp.int32)
        batch = batches.ragged(
            table, jnp.zeros(1, jnp.int32), count, page_size=self._max_len, num_tokens=size, max_query_len=size
        )
        tokens, kv = self._prefill(self._checkpoint.params, jnp.asarray(token_ids), batch, kv)
        return kv, int(tokens[0])

    def _program(self, attention: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
        model = functional(self._checkpoint.config, attention=attention, unroll_layers=True)

        def step(params: Any, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
            hidden, kv = model(params, token_ids, batch, kv)
            return jnp.argmax(model.logits(params, hidden[batch.logit_rows]), axis=-1).astype(jnp.int32), kv

        return jax.jit(step, donate_argnums=3)


def _powers_of_two(longest: int) -> list[int]:
    """From 16 on, the last one cut to `longest`."""
    return [min(1 << n, longest) for n in range(4, max(5, (longest - 1).bit_length() + 1))]
