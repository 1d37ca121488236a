"""The decoder of the Llama family as a Flax NNX module, and its functional form for the engine.

One decoder for all: what Llama, Mistral, Qwen2, Qwen3 and Gemma 2 do differently is in `TransformerConfig`.

Weights are stored [out, in] and contracted over their last axis, each layer keeps arrays of its own, and a tied head
is the embedding's own array: transposing or stacking weights would copy them.

On an accelerator the layers are unrolled. On a CPU they are a loop that switches between the layers' weights: nothing
is copied either, a step takes the same time, and it compiles several times faster, since attention is compiled once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from models import rope
from models.config import TransformerConfig
from models.linear import linear
from paged_jax.attention import attend, write_kv
from paged_jax.batch import Batch
from paged_jax.layout import KVLayout

Params = dict[str, Any]
Attention = Callable[..., tuple[Array, Any]]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
_NO_WINDOW = 2**31 - 1


def paged(
    q: Array,
    k: Array,
    v: Array,
    kv: Any,
    batch: Batch,
    *,
    layer: int | Array,
    scale: float,
    sliding_window: int | Array | None,
    logit_soft_cap: float | None,
) -> tuple[Array, Any]:
    """Attention over paged keys and values: write this step's, then attend over all; see `paged_jax.attend`."""
    kv = write_kv(kv, k, v, batch, layer=layer)
    out = attend(q, kv, batch, layer=layer, scale=scale, sliding_window=sliding_window, logit_soft_cap=logit_soft_cap)
    return out, kv


class DecoderLayer(nnx.Module):
    """Attention and a gated MLP, each behind an RMSNorm (between two with `post_norms`) and added to the residual
    stream.

    Attention itself lies between the two methods, in `Transformer`.
    """

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.config = config
        self.attn_norm = _norm(hidden, config, dtype)
        self.q = _weight(query, hidden, dtype, rngs)
        self.k = _weight(kv, hidden, dtype, rngs)
        self.v = _weight(kv, hidden, dtype, rngs)
        self.o = _weight(hidden, query, dtype, rngs)
        self.mlp_norm = _norm(hidden, config, dtype)
        self.gate = _weight(inner, hidden, dtype, rngs)
        self.up = _weight(inner, hidden, dtype, rngs)
        self.down = _weight(hidden, inner, dtype, rngs)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros(size, dtype)) for size in (query, kv, kv))
        if config.qk_norm:
            self.q_norm, self.k_norm = (_norm(head_dim, config, dtype) for _ in range(2))
        if config.post_norms:
            self.attn_post_norm, self.mlp_post_norm = (_norm(hidden, config, dtype) for _ in range(2))

    def before_attention(self, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values [num_tokens, heads, head_dim] of x[num_tokens, E], not rotated yet."""
        normed = _rms_norm(x, self.attn_norm, self.config)
        q, k, v = (linear(normed, weight[...]) for weight in (self.q, self.k, self.v))
        if self.config.qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        q, k, v = (y.reshape(x.shape[0], -1, self.config.head_dim) for y in (q, k, v))
        if self.config.qk_norm:
            q, k = _rms_norm(q, self.q_norm, self.config), _rms_norm(k, self.k_norm, self.config)
        return q, k, v

    def after_attention(self, x: Array, attended: Array) -> Array:
        """The layer's output [num_tokens, E] from its input and attended[num_tokens, num_heads, head_dim]."""
        out = linear(attended.reshape(x.shape[0], -1), self.o[...])
        if self.config.post_norms:
            out = _rms_norm(out, self.attn_post_norm, self.config)
        x = x + out
        normed = _rms_norm(x, self.mlp_norm, self.config)
        gate = _ACTIVATIONS[self.config.activation](linear(normed, self.gate[...]))
        out = linear(gate * linear(normed, self.up[...]), self.down[...])
        if self.config.post_norms:
            out = _rms_norm(out, self.mlp_post_norm, self.config)
        return x + out


class Transformer(nnx.Module):
    """A decoder-only transformer over a ragged batch of tokens.

    Args:
      config: shapes and constants.
      dtype: of weights and activations.
      rngs: makes random weights; a checkpoint replaces them.
      attention: `(q, k, v, kv, batch, *, layer, scale, sliding_window, logit_soft_cap) -> (out, kv)`, where the last
        three mean what they do for `paged_jax.attend`; paged by default. Another one, with another `kv`, gives the same
        model over another cache.
      unroll_layers: unroll the layers, or loop over them (see the module).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        attention: Attention = paged,
        unroll_layers: bool = True,
    ) -> None:
        self.config = config
        self.unroll_layers = unroll_layers
        self.attention = attention
        self.embed = _weight(config.vocab_size, config.hidden_size, dtype, rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = _norm(config.hidden_size, config, dtype)
        self.head = None if config.tie_word_embeddings else _weight(config.vocab_size, config.hidden_size, dtype, rngs)

    def __call__(self, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
        """Hidden states [num_tokens, E] after the final norm, and the updated kv."""
        cos_sin = rope.cos_sin(batch.positions, rope.inverse_frequencies(self.config))
        layers = list(self.layers)
        config = self.config
        attention = partial(
            self.attention,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            logit_soft_cap=config.attention_soft_cap,
        )
        windows: Any = config.sliding_windows
        if windows is not None and not self.unroll_layers:  # the layer's number is traced
            windows = jnp.array([_NO_WINDOW if window is None else window for window in windows], jnp.int32)

        def layer(index: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            x, kv = carry
            if self.unroll_layers:
                q, k, v = layers[index].before_attention(x)
            else:
                q, k, v = lax.switch(index, [layer.before_attention for layer in layers], x)
            q, k = rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin)
            window = None if windows is None else windows[index]
            attended, kv = attention(q, k, v, kv, batch, layer=index, sliding_window=window)
            if self.unroll_layers:
                return layers[index].after_attention(x, attended), kv
            return lax.switch(index, [layer.after_attention for layer in layers], x, attended), kv

        carry = (self.embed[...][token_ids] * config.embed_scale, kv)
        if self.unroll_layers:
            for index in range(len(layers)):
                carry = layer(index, carry)
        else:
            carry = lax.fori_loop(0, len(layers), layer, carry)
        x, kv = carry
        return _rms_norm(x, self.final_norm, config), kv

    def logits(self, hidden: Array) -> Array:
        """Float32 logits [rows, vocab_size]."""
        head = self.embed if self.head is None else self.head
        logits = linear(hidden, head[...], out_dtype=jnp.float32)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclass(frozen=True)
class FunctionalModel:
    """A `Transformer` without its weights: the model contract of `paged_jax.engine`.

    `params` is a dict of plain arrays, layers as a list: {"embed", "layers": [{"attn_norm", "q", "k", "v", "o",
    "mlp_norm", "gate", "up", "down"}, ...], "final_norm", "head" (absent when tied)}, and what else the configuration
    asks for (see `models.weights.params.build_params`).
    """

    config: TransformerConfig
    graphdef: nnx.GraphDef

    def __call__(
        self, params: Params, token_ids: Int32[Array, " num_tokens"], batch: Batch, kv: Any
    ) -> tuple[Float[Array, "num_tokens hidden"], Any]:
        """One step: hidden states of all tokens, and kv with this step's keys and values written."""
        return self._bind(params)(token_ids, batch, kv)

    def logits(self, params: Params, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of the rows given."""
        return self._bind(params).logits(hidden)

    def kv_layout(self, *, num_pages: int, page_size: int = 16, dtype: DTypeLike = jnp.float32) -> KVLayout:
        """The layout of a cache for this model.

        Raises:
          ValueError: num_pages is below 2, page_size below 1, or dtype is neither floating-point nor quantised.
        """
        return KVLayout(
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
        )

    def _bind(self, params: Params) -> Transformer:
        layers = dict(enumerate(params["layers"]))
        return nnx.merge(self.graphdef, {**params, "layers": layers})


def functional(
    config: TransformerConfig, *, attention: Attention = paged, unroll_layers: bool | None = None
) -> FunctionalModel:
    """The functional model of a configuration, without making any weights.

    Args:
      config: shapes and constants.
      attention: see `Transformer`.
      unroll_layers: see `Transformer`; None unrolls unless JAX's default backend is a CPU.
    """
    unroll = jax.default_backend() != "cpu" if unroll_layers is None else unroll_layers
    module = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), attention=attention, unroll_layers=unroll))
    return FunctionalModel(config, nnx.split(module)[0])


def random_params(config: TransformerConfig, *, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Params:
    """Random weights in the form that `FunctionalModel` takes; normal with deviation in_features ** -0.5."""
    module = Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed))
    pure: Params = nnx.to_pure_dict(nnx.state(module))
    return {**pure, "layers": [pure["layers"][i] for i in range(config.num_layers)]}


def _weight(out: int, inner: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param((jax.random.normal(rngs.params(), (out, inner)) * inner**-0.5).astype(dtype))


def _norm(size: int, config: TransformerConfig, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.full(size, 1 - config.norm_offset, dtype))


def _rms_norm(x: Array, weight: nnx.Param, config: TransformerConfig) -> Array:
    """Zhang and Sennrich 2019, eq. 4, over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps)
    return (wide * (weight[...].astype(jnp.float32) + config.norm_offset)).astype(x.dtype)
