"""A tiny model under the model contract, without Flax, and what greedy decoding of it must give."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax import KVLayout, attend, write_kv

VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 29, 4, 2, 8, 2
WIDTH = HEADS * HEAD_DIM


class TinyModel:
    """Attention layers only, in a scan; the next token depends on every earlier one as read from the pages."""

    def __call__(self, params, token_ids, batch, kv):
        x = params["embed"][token_ids] + params["place"][batch.positions]

        def layer(carry, weights):
            x, kv, index = carry
            q, k, v = (jnp.einsum("ti,oi->to", x, weights[name]).reshape(len(x), -1, HEAD_DIM) for name in "qkv")
            kv = write_kv(kv, k, v, batch, layer=index)
            return (x + attend(q, kv, batch, layer=index).reshape(len(x), WIDTH), kv, index + 1), None

        (x, kv, _), _ = lax.scan(layer, (x, kv, jnp.int32(0)), params["layers"])
        return x, kv

    def logits(self, params, hidden):
        return jnp.einsum("ti,oi->to", hidden, params["embed"])


@cache
def tiny_params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    kv_width = KV_HEADS * HEAD_DIM
    layers = {
        "q": normal(LAYERS, WIDTH, WIDTH) / 8,
        "k": normal(LAYERS, kv_width, WIDTH) / 8,
        "v": normal(LAYERS, kv_width, WIDTH) / 2,
    }
    return {"embed": normal(VOCAB, WIDTH), "place": normal(256, WIDTH), "layers": layers}


def tiny_layout(num_pages=40, page_size=4, dtype=jnp.float32):
    return KVLayout(LAYERS, num_pages, page_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)


def _same(x):
    return x


def numpy_int8(x):
    """What a pool of int8 makes of x[..., head_dim]."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.rint(x / scale) * scale


def numpy_logits(token_ids, through=_same):
    """Float64 logits after the last token, uncached; keys and values go `through` a function."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), tiny_params())
    num_tokens = len(token_ids)
    x = params["embed"][token_ids] + params["place"][:num_tokens]
    for index in range(LAYERS):
        q, k, v = ((x @ params["layers"][name][index].T).reshape(num_tokens, -1, HEAD_DIM) for name in "qkv")
        k, v = (np.repeat(through(y), HEADS // KV_HEADS, axis=1) for y in (k, v))
        logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        logits += np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(num_tokens, WIDTH)
    return params["embed"] @ x[-1]


@cache
def greedy(prompt, num_tokens, through=_same):
    """The first `num_tokens` greedy tokens after a prompt (a tuple), and the smallest gap of the top two logits."""
    tokens, gap = list(prompt), np.inf
    for _ in range(num_tokens):
        logits = numpy_logits(np.array(tokens), through)
        top = np.sort(logits)[-2:]
        gap = min(gap, top[1] - top[0])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], gap


class Letters:
    """Token i is the letter a + i; token 3 ends an answer."""

    eos_ids = frozenset({3})

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token) for token in token_ids)

    def stream(self):
        return self

    def push(self, token_id):
        return self.decode([token_id])

    def finish(self):
        return ""
