"""A transformer of one's own, without Flax: the model of all examples here.

What paged_jax asks of a model is the class at the end: `model(params, token_ids, batch, kv) -> (hidden, kv)`, which in
every layer writes keys and values and attends over the pages, and `model.logits(params, hidden)`. The network itself,
`forward`, takes its attention as an argument, so that training runs the same code over contiguous keys and values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax import Batch, KVLayout, KVPages, attend, write_kv

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CONTEXT = 2, 4, 2, 8, 64
WIDTH, INNER = NUM_HEADS * HEAD_DIM, 2 * NUM_HEADS * HEAD_DIM

Params = dict[str, Any]
Attention = Callable[[Array, Array, Array, Any, Array], tuple[Array, Any]]
"""(q, k, v, kv, layer) -> (attended, kv); q, k, v and attended are [num_tokens, heads, HEAD_DIM]."""


def init_params(seed: int, vocab_size: int) -> Params:
    """Random weights [out, in]; a layer's are stacked over the layers."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)

    return {
        "embed": weight(vocab_size, WIDTH),
        "position": weight(CONTEXT, WIDTH),
        "layers": {
            "q": weight(NUM_LAYERS, WIDTH, WIDTH),
            "k": weight(NUM_LAYERS, NUM_KV_HEADS * HEAD_DIM, WIDTH),
            "v": weight(NUM_LAYERS, NUM_KV_HEADS * HEAD_DIM, WIDTH),
            "o": weight(NUM_LAYERS, WIDTH, WIDTH),
            "up": weight(NUM_LAYERS, INNER, WIDTH),
            "down": weight(NUM_LAYERS, WIDTH, INNER),
        },
        "head": weight(vocab_size, WIDTH),
    }


def layout(num_pages: int, page_size: int = 4) -> KVLayout:
    """The pages for this model."""
    return KVLayout(NUM_LAYERS, num_pages, page_size, NUM_KV_HEADS, HEAD_DIM)


def forward(params: Params, token_ids: Array, positions: Array, kv: Any, attention: Attention) -> tuple[Array, Any]:
    """Hidden states [num_tokens, WIDTH]; in each layer attention and an MLP, normalised and added to the rest."""

    def layer(carry: tuple[Array, Any, Array], weights: dict[str, Array]) -> tuple[tuple[Array, Any, Array], None]:
        x, kv, index = carry
        q, k, v = (linear(normed(x), weights[name]).reshape(len(x), -1, HEAD_DIM) for name in "qkv")
        attended, kv = attention(q, k, v, kv, index)
        x = x + linear(attended.reshape(len(x), WIDTH), weights["o"])
        x = x + linear(jax.nn.relu(linear(normed(x), weights["up"])), weights["down"])
        return (x, kv, index + 1), None

    x = params["embed"][token_ids] + params["position"][positions]
    (x, kv, _), _ = lax.scan(layer, (x, kv, jnp.int32(0)), params["layers"])
    return normed(x), kv


def logits_of(params: Params, hidden: Array) -> Array:
    """[rows, vocab_size]."""
    return linear(hidden, params["head"])


def linear(x: Array, weight: Array) -> Array:
    """x [rows, in] times weight [out, in]."""
    return jnp.einsum("ti,oi->to", x, weight)


def normed(x: Array) -> Array:
    """RMSNorm without a weight."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def contiguous_logits(params: Params, token_ids: Array) -> Array:
    """Logits [num_tokens, vocab_size] of one whole sequence without any cache: what training differentiates."""

    def attention(q: Array, k: Array, v: Array, kv: None, layer: Array) -> tuple[Array, None]:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), kv

    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = forward(params, token_ids, positions, None, attention)
    return logits_of(params, hidden)


class OwnModel:
    """The same network over pages; this is all that the engine, or a loop of one's own, needs."""

    def __call__(self, params: Params, token_ids: Array, batch: Batch, kv: KVPages) -> tuple[Array, KVPages]:
        def attention(q: Array, k: Array, v: Array, kv: KVPages, layer: Array) -> tuple[Array, KVPages]:
            kv = write_kv(kv, k, v, batch, layer=layer)
            return attend(q, kv, batch, layer=layer), kv

        return forward(params, token_ids, batch.positions, kv, attention)

    def logits(self, params: Params, hidden: Array) -> Array:
        return logits_of(params, hidden)
