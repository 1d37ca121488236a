"""What a layer of a model calls: write this step's keys and values, then attend over all that is cached."""

from dataclasses import replace
from functools import partial

from jax import Array
from jaxtyping import Float, Int32

import pallas_kernels
from paged_jax.batch import Batch
from paged_jax.cache import KVPages

Layer = int | Int32[Array, ""]


def write_kv(
    kv: KVPages,
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    batch: Batch,
    *,
    layer: Layer,
) -> KVPages:
    """Writes the keys and values of the batch's tokens into their slots of one layer.

    Call it before `attend`, which reads every key from the pages. `layer` may be traced (a scan over layers). Padding
    tokens are dropped.

    Raises:
      ValueError: k or v do not fit the layout.
    """
    layout = kv.layout
    if k.shape[1:] != (kv.num_kv_heads, layout.head_dim):
        raise ValueError(
            f"k must be [num_tokens, {kv.num_kv_heads}, {layout.head_dim}] as in the layout, got {list(k.shape)}"
        )
    write = partial(
        pallas_kernels.write_kv,
        kv.pages,
        layout.pad_heads(k),
        layout.pad_heads(v),
        batch.slot_mapping,
        row_offset=layout.row_offset(layer),
    )
    if kv.scales is None:
        return replace(kv, pages=write())
    pages, scales = write(kv_scales=kv.scales)
    return replace(kv, pages=pages, scales=scales)


def attend(
    q: Float[Array, "num_tokens num_heads head_dim"],
    kv: KVPages,
    batch: Batch,
    *,
    layer: Layer,
    scale: Float[Array, ""] | float | None = None,
    sliding_window: Int32[Array, ""] | int | None = None,
    logit_soft_cap: float | None = None,
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Causal attention of the batch's queries over the pages of one layer; see `pallas_kernels.paged_attention`.

    Args:
      q: queries of the batch's tokens; padding rows give zeros.
      kv: the pages, this step's keys and values already written.
      batch: the step; its `implementation` is used.
      layer: which layer's pages; may be traced.
      scale: factor on the logits; head_dim ** -0.5 if None.
      sliding_window: keys a query may look back on, itself included; None for all.
      logit_soft_cap: `cap * tanh(logit / cap)`, or None.

    Raises:
      ValueError: q does not fit the layout, or an argument is out of range.
      NotImplementedError: the implementation lacks an argument, or the result is differentiated.
    """
    layout = kv.layout
    head_dim = q.shape[-1]
    if head_dim != layout.head_dim:
        raise ValueError(f"q's head_dim must be {layout.head_dim} as in the layout, got {head_dim}")
    out = pallas_kernels.paged_attention(
        layout.pad_heads(q),
        kv.pages,
        batch.block_tables,
        batch.seq_lens,
        batch.cu_query_lens,
        row_offset=layout.row_offset(layer),
        num_kv_heads=kv.num_kv_heads,
        scale=head_dim**-0.5 if scale is None else scale,
        max_query_len=batch.max_query_len,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        kv_scales=kv.scales,
        implementation=batch.implementation,
    )
    return out[..., :head_dim]
