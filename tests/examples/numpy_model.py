"""`own_model` again in float64 NumPy, without a cache: what the examples are held against."""

from collections.abc import Sequence

import jax
import numpy as np

from tests.examples.own_model import CONTEXT, HEAD_DIM, INNER, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, WIDTH, Params


def hidden_states(params: Params, token_ids: Sequence[int]) -> np.ndarray:
    """[num_tokens, WIDTH] of one sequence."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    n = len(token_ids)
    x = params["embed"][list(token_ids)] + params["position"][:n]
    for index in range(NUM_LAYERS):
        weights = {name: leaf[index] for name, leaf in params["layers"].items()}
        q, k, v = ((normed(x) @ weights[name].T).reshape(n, -1, HEAD_DIM) for name in "qkv")
        k, v = (np.repeat(heads, NUM_HEADS // NUM_KV_HEADS, axis=1) for heads in (k, v))
        logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) + np.triu(np.full((n, n), -np.inf), 1)
        attended = np.einsum("hqk,khd->qhd", np.exp(log_softmax(logits)), v).reshape(n, WIDTH)
        x = x + attended @ weights["o"].T
        x = x + np.maximum(normed(x) @ weights["up"].T, 0) @ weights["down"].T
    return normed(x)


def log_probs(params: Params, token_ids: Sequence[int]) -> np.ndarray:
    """[num_tokens, vocab_size]: row i is about the token after token i."""
    return log_softmax(hidden_states(params, token_ids) @ np.asarray(params["head"], np.float64).T)


def log_prob_bound(params: Params) -> float:
    """How far a float32 log-probability may lie from the exact one, to first order in u = 2**-24.

    A sum of n products is off by at most 3 sqrt(n) u relative to its terms, with a probability near one (Higham and
    Mary 2019, theorem 2.4). On the longest way through the model lie six contractions a layer (q or k, q k, weights v,
    o, up, down) and the head, none longer than the largest axis; the stream is normalised before each, so an error is
    carried on with a factor near one. Times the largest logit, which |head| |normed| = |head| sqrt(WIDTH) bounds, that
    is the logits' error; a log-softmax at most doubles it.
    """
    relative = (6 * NUM_LAYERS + 1) * 3 * np.sqrt(max(INNER, CONTEXT)) * 2**-24
    largest_logit = np.sqrt(WIDTH) * np.linalg.norm(params["head"], axis=-1).max()
    return float(2 * relative * largest_logit)


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
