"""What the dtype of the pages does to a text's likelihood."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from tqdm import tqdm

from models import registry
from models.registry import Checkpoint
from models.transformer import FunctionalModel, functional
from paged_jax import PagedCache, append
from paged_jax.layout import ceil_div
from scripts.command_line import DTYPES, KV_DTYPES

TEXT = Path(__file__).parents[2] / "tests" / "data" / "perplexity.txt"


def perplexity(args: argparse.Namespace) -> list[dict[str, Any]]:
    """exp of the text's mean negative log-likelihood a token, and its change from the first dtype of the pages."""
    rows = []
    for dtype in args.dtypes:
        checkpoint = registry.load(args.model, dtype=DTYPES[dtype])
        token_ids = checkpoint.tokenizer.encode(args.text.read_text(encoding="utf-8"))
        first = None
        for kv_dtype in tqdm(args.kv_dtypes, desc=dtype, disable=None, leave=False):
            scores = teacher_forced(checkpoint, token_ids, KV_DTYPES[kv_dtype], page_size=args.page_size)
            loss = -float(scores.logprobs.mean())
            first = loss if first is None else first
            row = {"weights": dtype, "pages": kv_dtype, "tokens": len(token_ids), "perplexity": f"{np.exp(loss):.4f}"}
            rows.append(row | {"change": f"{np.expm1(loss - first):+.3%}"})
    return rows


class Scores(NamedTuple):
    """What a model makes of given tokens, for each of them but the first.

    Attributes:
      logprobs: float64 [scored], log probability of the token, in nats.
      likeliest: int32 [scored], the likeliest token at its place.
      gaps: float32 [scored], by how much that one's logit is above the next.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray
    gaps: np.ndarray


def teacher_forced(
    checkpoint: Checkpoint, token_ids: Sequence[int], kv_dtype: DTypeLike, *, page_size: int = 16, chunk: int = 128
) -> Scores:
    """Scores of given tokens, every key and value read back from pages of `kv_dtype`.

    Args:
      checkpoint: the model.
      token_ids: at least two tokens.
      kv_dtype: of the pages.
      page_size: tokens a page.
      chunk: tokens of a step.
    """
    model = functional(checkpoint.config)
    given, targets = np.asarray(token_ids[:-1], np.int32), np.asarray(token_ids[1:], np.int32)
    pages_per_seq = ceil_div(ceil_div(len(given), chunk) * chunk, page_size)  # few shapes for many lengths
    layout = model.kv_layout(num_pages=pages_per_seq + 1, page_size=page_size, dtype=kv_dtype)
    cache = PagedCache.create(layout, max_seqs=1, pages_per_seq=pages_per_seq)
    parts = []
    for start in range(0, len(given), chunk):
        count = min(chunk, len(given) - start)
        inputs = [jnp.asarray(np.pad(x[start : start + count], (0, chunk - count))) for x in (given, targets)]
        cache, scores = _score_chunk(model, checkpoint.params, cache, *inputs, jnp.int32(count))
        parts.append([np.asarray(score)[:count] for score in scores])
    logprobs, likeliest, gaps = map(np.concatenate, zip(*parts, strict=True))
    return Scores(logprobs.astype(np.float64), likeliest, gaps)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score_chunk(
    model: FunctionalModel, params: Any, cache: PagedCache, given: Array, targets: Array, count: Array
) -> tuple[PagedCache, tuple[Array, Array, Array]]:
    cache, batch, _ = append(cache, count[None], num_tokens=given.shape[0])
    hidden, kv = model(params, given, batch, cache.kv)
    logits = model.logits(params, hidden)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[:, None], axis=1)[:, 0]
    values, tokens = jax.lax.top_k(logits, 2)
    return replace(cache, kv=kv), (logprobs, tokens[:, 0], values[:, 0] - values[:, 1])
