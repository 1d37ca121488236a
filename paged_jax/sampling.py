"""Choosing the next token from logits: what a request may ask for, and the pure function that does it.

A row's token is `argmax(logits)` at temperature 0. Otherwise it is `jax.random.categorical(key, kept)`: `kept` are the
logits divided by the temperature, with -inf for all that top-k, top-p and min-p (in this order, each on what the one
before has left) drop, and `key` is `fold_in(fold_in(key(seed), child), position)`. Nothing else about the batch enters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32

MAX_TOP_LOGPROBS: Final = 20
"""Most likely tokens that can be reported beside the chosen one."""

LogitsProcessor = Callable[[Float[Array, "rows vocab"], Int32[Array, "rows max_len"]], Float[Array, "rows vocab"]]
"""(float32 logits, tokens of each row so far padded with -1) -> logits; pure, compiled into the step."""

_FEW: Final = 64
"""Candidates that are looked at before the whole vocabulary is sorted: top_k(64) costs a fiftieth of the sort."""
_MAX_INT32: Final = 2**31 - 1
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the default is greedy.

    Attributes:
      temperature: the logits are divided by it; 0 takes the most likely token, whatever the fields below say.
      top_k: keep the k most likely tokens, lower ids first among equals; None for all.
      top_p: keep the fewest most likely tokens whose probabilities sum to at least top_p (nucleus sampling, Holtzman
        et al. 2020); 1 for all.
      min_p: keep the tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024); 0 for all.
      repetition_penalty: logits of tokens that prompt or answer hold already are divided by it if positive, else
        multiplied (Keskar et al. 2019); 1 for none. Applies at temperature 0 too.
      seed: the same seed, sample and position give the same draw, whatever else runs.

    Raises:
      ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= _MAX_FLOAT32:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0 keeps all tokens")
        if not 0 < self.repetition_penalty <= _MAX_FLOAT32:
            raise ValueError(
                f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}; 1 is no penalty"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


class SamplingArrays(NamedTuple):
    """The parameters of a step's rows, operands of the compiled program.

    Attributes:
      temperature, top_p, min_p, repetition_penalty: float32 [rows].
      top_k: int32 [rows]; 2**31 - 1 for all.
      seed, child: uint32 [rows]; child is the sample's index in its request.
      top_logprobs: int32 [rows], how many of the most likely tokens are to be reported.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    seed: Array
    child: Array
    top_logprobs: Array


class Logprobs(NamedTuple):
    """Log probabilities of one token a row.

    Attributes:
      chosen: float32 [rows], of the row's token.
      top: float32 [rows, up to MAX_TOP_LOGPROBS], the largest, descending; zeros when no row asked.
      top_ids: int32, as `top`, whose they are.
    """

    chosen: Array
    top: Array
    top_ids: Array


def pack(rows: Sequence[tuple[SamplingParams, int, int]], size: int) -> SamplingArrays:
    """Host arrays of `size` rows from each row's (params, child, top_logprobs); greedy rows as padding."""
    padded = [*rows, *[(SamplingParams(), 0, 0)] * (size - len(rows))]
    params = [row[0] for row in padded]
    columns: list[Any] = [
        np.array([p.temperature for p in params], np.float32),
        np.array([_MAX_INT32 if p.top_k is None else min(p.top_k, _MAX_INT32) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([p.repetition_penalty for p in params], np.float32),
        np.array([p.seed for p in params], np.uint32),
        np.array([row[1] for row in padded], np.uint32),
        np.array([row[2] for row in padded], np.int32),
    ]
    return SamplingArrays(*columns)


def greedy(logits: Float[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """The token with the largest logit, the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def penalise(
    logits: Float[Array, "rows vocab"],
    context: Int32[Array, "rows max_len"],
    penalty: Float[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """The repetition penalty: once for every token that `context` (padded with -1) holds."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    seen = jnp.take_along_axis(logits, jnp.maximum(context, 0), axis=1)
    penalised = jnp.where(seen > 0, seen / penalty[:, None], seen * penalty[:, None])
    return logits.at[row, jnp.where(context < 0, logits.shape[1], context)].set(penalised, mode="drop")


def sample(
    logits: Float[Array, "rows vocab"], params: SamplingArrays, positions: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """The next token of each row.

    Args:
      logits: float32, processor and penalty applied.
      params: the rows' parameters.
      positions: place of the new token in its sequence.

    Work follows what the rows ask for: no noise when all are greedy, no sort of the vocabulary unless some row's cut
    may lie past its 64 most likely tokens.
    """
    best = greedy(logits)
    wanted = params.temperature > 0
    return lax.cond(wanted.any(), lambda: jnp.where(wanted, _draw(logits, params, positions), best), lambda: best)


def logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"], top_logprobs: Int32[Array, " rows"]
) -> Logprobs:
    """Log probabilities of `tokens`, and of the most likely ones if any row wants some."""
    width = min(MAX_TOP_LOGPROBS, logits.shape[1])
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    none = jnp.zeros((logits.shape[0], width), jnp.float32), jnp.zeros((logits.shape[0], width), jnp.int32)
    top, top_ids = lax.cond((top_logprobs > 0).any(), lambda: tuple(lax.top_k(logits, width)), lambda: none)
    return Logprobs(chosen - total, top - total[:, None], top_ids)


def _draw(logits: Array, params: SamplingArrays, positions: Array) -> Array:
    """Tokens at the rows' temperatures (1 for greedy rows, whose draw is not used)."""
    vocab = logits.shape[1]
    temperature = jnp.where(params.temperature > 0, params.temperature, jnp.float32(1))
    # Differences from the largest logit, so that a small temperature overflows to -inf and never to nan.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    noise = jax.vmap(partial(_noise, vocab=vocab))(params.seed, params.child, positions)
    drawn = greedy(jnp.where(scaled >= jnp.log(params.min_p)[:, None], scaled + noise, -jnp.inf))

    is_cut = (params.temperature > 0) & ((params.top_k < vocab) | (params.top_p < 1))
    few, enough = _draw_ranked(scaled, noise, params, min(_FEW, vocab))
    chosen = jnp.where(is_cut, few, drawn)
    if vocab <= _FEW:
        return chosen
    needs_sort = is_cut & ~enough
    ranked = lax.cond(needs_sort.any(), lambda: _draw_ranked(scaled, noise, params, vocab)[0], lambda: few)
    return jnp.where(needs_sort, ranked, chosen)


def _draw_ranked(scaled: Array, noise: Array, params: SamplingArrays, width: int) -> tuple[Array, Array]:
    """Draws among the `width` most likely tokens; also whether no token beyond them could have been kept."""
    values, ids = lax.top_k(scaled, width)
    in_top_k = jnp.arange(width, dtype=jnp.int32) < params.top_k[:, None]
    total = jnp.where(
        params.top_k <= width,
        jax.nn.logsumexp(jnp.where(in_top_k, values, -jnp.inf), axis=-1),
        jax.nn.logsumexp(scaled, axis=-1),
    )
    probs = jnp.exp(values - total[:, None])
    mass = jnp.cumsum(probs, axis=-1)
    top_p = params.top_p[:, None]
    keep = in_top_k & ((mass - probs < top_p) | (top_p >= 1)) & (values >= jnp.log(params.min_p)[:, None])
    choice = jnp.argmax(jnp.where(keep, values + jnp.take_along_axis(noise, ids, axis=1), -jnp.inf), axis=-1)
    tokens = jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0]
    all_ranked = (params.top_k >= scaled.shape[1]) & (mass[:, -1] >= params.top_p)
    return tokens, (params.top_k <= width) | all_ranked


def _noise(seed: Array, child: Array, position: Array, *, vocab: int) -> Array:
    """Gumbel noise of one row, as `jax.random.categorical` adds it. Threefry by name: another default generator would
    not be the same under vmap, and so depend on the batch."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), child)
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)
