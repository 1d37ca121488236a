"""Checks that hold for every backend: shapes, dtypes and ranges, before anything is traced or changed."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantisation import QUANTISED_DTYPES

INT32 = jnp.dtype("int32")


def check_choice(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} or None, got {got!r}")


def check_attention(
    q: Array,
    kv_pages: Array,
    kv_scales: Array | None,
    block_tables: Array,
    seq_lens: Array,
    cu_query_lens: Array,
    num_kv_heads: int,
    max_query_len: int,
    sliding_window: Any,
    logit_soft_cap: float | None,
) -> None:
    """Raises ValueError unless the arguments of `paged_attention` fit together."""
    _check_rank("q", q, 3, "[num_tokens, num_heads, head_dim]")
    _check_rank("block_tables", block_tables, 2, "[num_seqs, pages_per_seq]")
    _check_rank("seq_lens", seq_lens, 1, "[num_seqs]")
    _check_rank("cu_query_lens", cu_query_lens, 1, "[num_seqs + 1]")
    _, num_heads, head_dim = q.shape
    num_seqs = block_tables.shape[0]
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
    _check_pool(kv_pages, kv_scales, num_kv_heads, head_dim)
    if seq_lens.shape != (num_seqs,):
        raise ValueError(f"seq_lens must be [{num_seqs}] like block_tables' rows, got {list(seq_lens.shape)}")
    if cu_query_lens.shape != (num_seqs + 1,):
        raise ValueError(f"cu_query_lens must be [{num_seqs + 1}] (num_seqs + 1), got {list(cu_query_lens.shape)}")
    for name, array in (("block_tables", block_tables), ("seq_lens", seq_lens), ("cu_query_lens", cu_query_lens)):
        _check_int32(name, array)
    _check_floating("q", q)
    if max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1, got {max_query_len}")
    if isinstance(sliding_window, int) and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 (or None for no window), got {sliding_window}")
    if logit_soft_cap is not None and not logit_soft_cap > 0:
        raise ValueError(f"logit_soft_cap must be above 0 (or None for no cap), got {logit_soft_cap}")


def check_write(kv_pages: Array, kv_scales: Array | None, k: Array, v: Array, slot_mapping: Array) -> None:
    """Raises ValueError unless the arguments of `write_kv` fit together."""
    _check_rank("k", k, 3, "[num_tokens, num_kv_heads, head_dim]")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {list(k.shape)}, got {list(v.shape)}")
    num_tokens, num_kv_heads, head_dim = k.shape
    _check_pool(kv_pages, kv_scales, num_kv_heads, head_dim)
    if slot_mapping.shape != (num_tokens,):
        raise ValueError(f"slot_mapping must be [{num_tokens}] like k's tokens, got {list(slot_mapping.shape)}")
    _check_int32("slot_mapping", slot_mapping)
    _check_floating("k", k)
    _check_floating("v", v)


def _check_pool(kv_pages: Array, kv_scales: Array | None, num_kv_heads: int, head_dim: int) -> None:
    _check_rank("kv_pages", kv_pages, 3, "[num_layers * num_pages, page_size, num_kv_heads * 2 * head_dim]")
    lanes = num_kv_heads * 2 * head_dim
    if kv_pages.shape[2] != lanes:
        raise ValueError(
            f"kv_pages' last axis must be num_kv_heads * 2 * head_dim = {num_kv_heads} * 2 * {head_dim} = {lanes}, "
            f"got {kv_pages.shape[2]}"
        )
    quantised = kv_pages.dtype in QUANTISED_DTYPES
    if not quantised and not jnp.issubdtype(kv_pages.dtype, jnp.floating):
        allowed = " or ".join(map(str, QUANTISED_DTYPES))
        raise ValueError(f"kv_pages must be a floating-point array, or quantised ({allowed}), got {kv_pages.dtype}")
    if kv_scales is None:
        if quantised:
            raise ValueError(f"kv_scales must be given for a quantised pool (kv_pages is {kv_pages.dtype}), got None")
        return
    if not quantised:
        raise ValueError(
            f"kv_scales must be None for a pool that is not quantised (kv_pages is {kv_pages.dtype}), got an array"
        )
    shape = (kv_pages.shape[0], num_kv_heads * 2, kv_pages.shape[1])
    if kv_scales.shape != shape or kv_scales.dtype != jnp.float32:
        raise ValueError(
            f"kv_scales must be float32 [rows, num_kv_heads * 2, page_size] = {list(shape)}, got {kv_scales.dtype} "
            f"{list(kv_scales.shape)}"
        )


def _check_rank(name: str, array: Array, rank: int, axes: str) -> None:
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes {axes}, got shape {list(array.shape)}")


def _check_int32(name: str, array: Array) -> None:
    if array.dtype != INT32:
        raise ValueError(f"{name} must be int32, got {array.dtype}; convert it with .astype(jnp.int32)")


def _check_floating(name: str, array: Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating-point array, got {array.dtype}")
