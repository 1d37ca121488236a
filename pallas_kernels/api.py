"""The operation: check the arguments, choose the implementation, call it.

Layout of the pool, the same for every implementation: `kv_pages[rows, page_size, num_kv_heads * 2 * head_dim]`.
A row is one page of one layer, `rows = num_layers * num_pages`, and layer `l` starts at row `l * num_pages`
(`row_offset`). On the last axis every KV head holds its key and then its value.

A pool of int8 or float8_e4m3fn is quantised and comes with `kv_scales[rows, num_kv_heads * 2, page_size]`, float32: a
token's key in KV head h is its codes times scale 2h, its value its codes times scale 2h + 1.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import mosaic_gpu, mosaic_tpu, reference, validation, xla
from pallas_kernels.quantisation import quantise

IMPLEMENTATIONS: Final[Mapping[str, Callable[..., tuple[Array, Array]]]] = MappingProxyType(
    {
        "xla": xla.paged_attention,
        "reference": reference.paged_attention,
        "mosaic_gpu": mosaic_gpu.paged_attention,
        "mosaic_tpu": mosaic_tpu.paged_attention,
    }
)
"""Implementation name -> function. `xla` runs on every backend; `reference` is the slow oracle of the tests.

Each is called as `f(q, kv_pages, block_tables, seq_lens, cu_query_lens, row_offset, scale, window, kv_scales, *,
num_kv_heads, max_query_len, logit_soft_cap) -> (out, lse)`, with scalars as arrays and None for the scales of a
floating-point pool.
"""

_CHECKS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {"mosaic_gpu": mosaic_gpu.check, "mosaic_tpu": mosaic_tpu.check}
)
"""What an implementation that does not take everything refuses."""

_NO_WINDOW: Final = 2**31 - 1

Scalar = Int32[Array, ""] | int


def default_implementation() -> str:
    """The implementation that `implementation=None` selects on the default backend, if it takes the arguments.

    The kernels do not take every dtype and shape (`mosaic_gpu.check`, `mosaic_tpu.check`); "xla" runs in their place
    then.
    """
    return {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}.get(jax.default_backend(), "xla")


def paged_attention(
    q: Float[Array, "num_tokens num_heads head_dim"],
    kv_pages: Num[Array, "rows page_size lanes"],
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    seq_lens: Int32[Array, " num_seqs"],
    cu_query_lens: Int32[Array, " num_seqs+1"],
    *,
    row_offset: Scalar,
    num_kv_heads: int,
    scale: Float[Array, ""] | float,
    max_query_len: int,
    sliding_window: Scalar | None = None,
    logit_soft_cap: float | None = None,
    kv_scales: Float32[Array, "rows num_scales page_size"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal attention of a ragged batch of queries over keys and values that live in pages.

    Sequence `s` owns queries `cu_query_lens[s]:cu_query_lens[s + 1]` of `q`. Its keys are positions
    `0..seq_lens[s] - 1`, all of them (this step's included) already written to the pages that
    `block_tables[s]` names: position `j` lives in page `block_tables[s, j // page_size]`, offset
    `j % page_size`. Query `i` of the sequence sits at position `seq_lens[s] - query_len + i`, and key `j` is
    visible to position `p` iff `p - sliding_window < j <= p`. Decode is query length 1, a prefill chunk is
    longer, and one batch may mix both. Accumulation is in float32; slots that no sequence owns, the null page
    and slots past `seq_lens` may hold anything, NaN included, without changing one bit of the result.

    Source: softmax(q k^T * scale) v as in Vaswani et al. 2017, eq. 1; the online form of Milakov and
    Gimelshein 2018, algorithm 3; pages as in Kwon et al. 2023, section 4.

    Args:
      q: queries of all sequences, packed. Rows past the last sequence are padding and give zeros.
      kv_pages: the pool of all layers; the last axis is `num_kv_heads * 2 * head_dim` (see the module).
      block_tables: page ids inside a layer; entries past a sequence's last page are not read.
      seq_lens: tokens in the cache, this step's included. Padding sequences have 0.
      cu_query_lens: cumulative query lengths from 0; padding sequences repeat the last value. A query length of
        0 beside a positive `seq_lens` is legal.
      row_offset: the layer's first row, `layer * num_pages`; may be traced.
      num_kv_heads: KV heads; `num_heads` is a multiple of it (MHA, GQA, MQA).
      scale: factor on the logits, usually `head_dim ** -0.5`; may be traced.
      max_query_len: static upper bound of the query lengths. 1 launches the decode algorithm alone.
      sliding_window: keys a query may look back on, itself included; None for all; may be traced.
      logit_soft_cap: `cap * tanh(logit / cap)` on the scaled logits (Gemma 2), or None.
      kv_scales: the scales of a quantised pool; None for a floating-point pool.
      return_lse: also give the log-sum-exp of each row's logits.
      implementation: a key of `IMPLEMENTATIONS`, or None to choose by platform. A named one runs or raises.

    Returns:
      `out[num_tokens, num_heads, head_dim]` in q's dtype; with `return_lse`, `(out, lse)` where
      `lse[num_tokens, num_heads]` is float32 (natural logarithm). Padding rows, and rows of sequences with
      `seq_lens` 0, are zeros (lse `-inf`).

    Raises:
      ValueError: a shape, dtype or static value is wrong, or the implementation is unknown.
      NotImplementedError: the implementation lacks an argument (named), or the result is differentiated.
    """
    validation.check_attention(
        q, kv_pages, kv_scales, block_tables, seq_lens, cu_query_lens, num_kv_heads, max_query_len, sliding_window,
        logit_soft_cap,
    )  # fmt: skip
    name = implementation or default_implementation()
    validation.check_choice("implementation", name, tuple(IMPLEMENTATIONS))
    if name in _CHECKS:
        try:
            _CHECKS[name](q, kv_pages, block_tables, num_kv_heads=num_kv_heads, max_query_len=max_query_len)
        except (ValueError, NotImplementedError):
            if implementation is not None:
                raise
            name = "xla"
    window = _NO_WINDOW if sliding_window is None else sliding_window

    def attend(*operands: Array | None) -> tuple[Array, Array]:
        return IMPLEMENTATIONS[name](
            *operands, num_kv_heads=num_kv_heads, max_query_len=max_query_len, logit_soft_cap=logit_soft_cap
        )

    out, lse = _inference_only(attend)(
        q, kv_pages, block_tables, seq_lens, cu_query_lens,
        jnp.asarray(row_offset, jnp.int32), jnp.asarray(scale, jnp.float32), jnp.asarray(window, jnp.int32), kv_scales,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@overload
def write_kv(
    kv_pages: Array, k: Array, v: Array, slot_mapping: Array, *, row_offset: Scalar, kv_scales: None = None
) -> Array: ...


@overload
def write_kv(
    kv_pages: Array, k: Array, v: Array, slot_mapping: Array, *, row_offset: Scalar, kv_scales: Array
) -> tuple[Array, Array]: ...


def write_kv(
    kv_pages: Num[Array, "rows page_size lanes"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    row_offset: Scalar,
    kv_scales: Float32[Array, "rows num_scales page_size"] | None = None,
) -> Any:
    """Writes each token's key and value into its slot of one layer. In place when `kv_pages` is donated.

    Args:
      kv_pages: the pool of all layers (see the module for the axes).
      k: keys; cast to the pool's dtype, or quantised (see `pallas_kernels.quantisation.quantise`).
      v: values, likewise.
      slot_mapping: `page_id * page_size + offset` inside the layer; a negative slot drops its token (padding, or
        a token whose key and value are in the cache already). Slots that are not dropped must differ.
      row_offset: the layer's first row, `layer * num_pages`; may be traced.
      kv_scales: the scales of a quantised pool; None for a floating-point pool.

    Returns:
      The pool with `num_tokens` slots written, or `(pages, scales)` of a quantised pool; a dropped token changes no
      byte of any layer.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    validation.check_write(kv_pages, kv_scales, k, v, slot_mapping)
    num_rows, page_size, lanes = kv_pages.shape
    num_tokens = k.shape[0]
    # Past all layers, so that adding row_offset cannot make a dropped token land in another layer.
    row = jnp.where(slot_mapping < 0, jnp.int32(num_rows), slot_mapping // page_size + row_offset)
    offset = slot_mapping % page_size
    tokens = jnp.stack([k, v], axis=2)
    if kv_scales is None:
        return kv_pages.at[row, offset].set(tokens.reshape(num_tokens, lanes).astype(kv_pages.dtype), mode="drop")
    codes, scales = quantise(tokens, kv_pages.dtype)
    return (
        kv_pages.at[row, offset].set(codes.reshape(num_tokens, lanes), mode="drop"),
        kv_scales.at[row, :, offset].set(scales.reshape(num_tokens, -1), mode="drop"),
    )


def _inference_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes differentiation of `function` a clear error instead of a wrong or a missing gradient."""

    def jvp(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "paged_attention is for inference and has no derivative; for training, attend over contiguous keys and "
            "values (for example jax.nn.dot_product_attention)"
        )

    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(jvp)
    return wrapped
