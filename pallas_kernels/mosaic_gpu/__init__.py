"""Paged attention for NVIDIA GPUs in Pallas Mosaic GPU; see docs/kernels.md.

The kernels, and Pallas with them, are imported when first traced: importing this costs nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.quantisation import QUANTISED_DTYPES
from pallas_kernels.ragged import owner

HEAD_DIMS: Final = (64, 128, 256)
PAGE_SIZES: Final = (8, 16, 32, 64, 128)
MAX_GROUP: Final = 16
_DTYPES: Final = ("bfloat16", "float16")
_SMALL_SHARED_MEMORY: Final = ((8, 9), (12, 0))  # capabilities whose blocks cannot hold two tiles of head_dim 256
_QUANTISED_CHIPS: Final = ((9, 0), (10, 0))  # for which kernels over quantised pools were compiled
_MIN_COPY_BYTES: Final = 4096  # of a cp.async copy: 16 from each thread, twice since rows are swizzled by eights


def check(
    q: Array,
    kv_pages: Array,
    block_tables: Array,
    *,
    num_kv_heads: int,
    max_query_len: int,
) -> None:
    """Raises unless the kernels can take the arguments on the GPU that is compiled for.

    Raises:
      ValueError: a dtype or a shape is none of those supported.
      NotImplementedError: the platform or the chip is none of those supported.
    """
    del block_tables, max_query_len  # any will do
    problem = _unsupported_chip(q.shape[-1], kv_pages.shape[1], kv_pages.dtype)
    if problem is not None:
        raise NotImplementedError(problem)
    if q.dtype.name not in _DTYPES:
        raise ValueError(_message("q's dtype", q.dtype, " or ".join(_DTYPES)))
    if kv_pages.dtype not in (q.dtype, *QUANTISED_DTYPES):
        supported = " or ".join([f"q's, {q.dtype}", *map(str, QUANTISED_DTYPES)])
        raise ValueError(_message("kv_pages' dtype", kv_pages.dtype, supported))
    group = q.shape[1] // num_kv_heads
    for name, got, allowed in (
        ("head_dim", q.shape[2], HEAD_DIMS),
        ("page_size", kv_pages.shape[1], PAGE_SIZES),
        ("num_heads / num_kv_heads", group, range(1, MAX_GROUP + 1)),
    ):
        if got not in allowed:
            remedy = " (pad smaller ones: KVLayout.padded_head_dim)" if name == "head_dim" else ""
            choices = f"1 to {MAX_GROUP}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            raise ValueError(_message(name, got, choices + remedy))


@partial(jax.jit, static_argnames=("num_kv_heads", "max_query_len", "logit_soft_cap"))
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
    """See `pallas_kernels.api.paged_attention`; returns (out, lse). Jitted so that the layers share one trace.

    Sequences of one query go through the decode kernel, longer ones through the prefill kernel, which is launched only
    when `max_query_len` allows any.
    """
    from pallas_kernels.mosaic_gpu import scales, target
    from pallas_kernels.mosaic_gpu.decode import decode
    from pallas_kernels.mosaic_gpu.prefill import prefill

    if kv_scales is not None and not scales.lie_where_copies_reach(target.current(), kv_pages.shape[1]):
        kv_scales = scales.by_key(kv_scales, block_tables, row_offset)
    num_tokens = q.shape[0]
    query_lens = cu_query_lens[1:] - cu_query_lens[:-1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq, is_query = owner(cu_query_lens[1:], token), token < cu_query_lens[-1]

    # One query a sequence, its last one, whatever its number; length 0 where that is not one.
    out, lse = decode(
        q[jnp.clip(cu_query_lens[1:] - 1, 0, num_tokens - 1)],
        kv_pages, kv_scales, block_tables, jnp.where(query_lens == 1, seq_lens, 0), row_offset, scale, window,
        num_kv_heads=num_kv_heads, logit_soft_cap=logit_soft_cap,
    )  # fmt: skip
    out, lse = out[seq].astype(q.dtype), lse[seq]
    if max_query_len > 1 and num_tokens > 1:
        prefill_lens = jnp.where((query_lens > 1) & (seq_lens > 0), query_lens, 0)
        chunks, chunks_lse = prefill(
            q, kv_pages, kv_scales, block_tables, seq_lens, cu_query_lens, prefill_lens, row_offset, scale, window,
            num_kv_heads=num_kv_heads, logit_soft_cap=logit_soft_cap,
        )  # fmt: skip
        in_chunk = prefill_lens[seq] > 0
        out = jnp.where(in_chunk[:, None, None], chunks, out)
        lse = jnp.where(in_chunk[:, None], chunks_lse, lse)
    return jnp.where(is_query[:, None, None], out, jnp.zeros((), q.dtype)), jnp.where(is_query[:, None], lse, -jnp.inf)


def _unsupported_chip(head_dim: int, page_size: int, pool_dtype: np.dtype) -> str | None:
    from pallas_kernels.mosaic_gpu import target

    if target.interpreting():
        return None
    capability = target.capability()
    chips = _names(target.CAPABILITIES)
    if capability is None:
        return _message("the platform", repr(jax.default_backend()), f"an NVIDIA GPU ({chips})")
    chip = _names([capability])
    if capability not in target.CAPABILITIES:
        return _message("the chip", chip, chips)
    if head_dim == 256 and capability in _SMALL_SHARED_MEMORY:
        return _message("head_dim", f"256 on {chip}", "64, 128 there (a block has too little shared memory)")
    if pool_dtype in QUANTISED_DTYPES and capability not in _QUANTISED_CHIPS:
        return _message(
            "kv_pages' dtype", f"{pool_dtype} on {chip}", f"q's there, and any on {_names(_QUANTISED_CHIPS)}"
        )
    least = _MIN_COPY_BYTES // (2 * head_dim * pool_dtype.itemsize)
    if capability < (9, 0) and page_size < least:
        pool = f"{pool_dtype} and head_dim {head_dim}"
        return _message("page_size", f"{page_size} on {chip}", f"{least} and more there with {pool}")
    return None


def _names(capabilities: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)


def _message(name: str, got: object, supported: str) -> str:
    return (
        f"implementation 'mosaic_gpu': {name} is {got}, supported is {supported}; implementation='xla' takes every "
        "argument on every platform"
    )
