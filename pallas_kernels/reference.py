"""The oracle: gather every page of every query's sequence, mask, softmax in float32, plain jnp.

Memory is queries x table; use it in tests only.
"""

import jax.numpy as jnp
from jax import Array


def paged_attention(
    q: Array,
    kv_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    cu_query_lens: Array,
    row_offset: Array,
    scale: Array,
    window: Array,
    kv_scales: Array | None,
    *,
    num_kv_heads: int,
    max_query_len: int,
    logit_soft_cap: float | None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.api.paged_attention`; returns (out, lse)."""
    del max_query_len  # every query is treated alike
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, pages_per_seq = block_tables.shape
    page_size = kv_pages.shape[1]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(cu_query_lens, token, side="right").astype(jnp.int32) - 1
    is_query = (seq >= 0) & (seq < num_seqs)
    seq = jnp.clip(seq, 0, num_seqs - 1)
    position = seq_lens[seq] - cu_query_lens[seq + 1] + token

    rows = block_tables[seq] + row_offset
    kv = kv_pages[rows].astype(jnp.float32)
    kv = kv.reshape(num_tokens, pages_per_seq * page_size, num_kv_heads, 2, head_dim)
    if kv_scales is not None:
        kv *= jnp.moveaxis(kv_scales[rows], -1, -2).reshape(*kv.shape[:-1], 1)
    key_position = jnp.arange(pages_per_seq * page_size, dtype=jnp.int32)
    owned = key_position < seq_lens[seq][:, None]
    kv = jnp.where(owned[:, :, None, None, None], kv, 0.0)
    visible = (key_position <= position[:, None]) & (key_position > position[:, None] - window)
    visible = (visible & owned & is_query[:, None])[:, None, None, :]

    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = jnp.einsum("tkgd,tskd->tkgs", grouped, kv[:, :, :, 0], precision="highest") * scale
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    peak = logits.max(axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, kv[:, :, :, 1], precision="highest") / jnp.where(total > 0, total, 1.0)
    lse = peak + jnp.log(total)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(num_tokens, num_heads)
