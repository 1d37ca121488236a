"""How long attention takes on the device that is here: ours, XLA's, JAX's own kernels', torch's, over equal shapes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import QUANTISED_DTYPES, default_implementation, paged_attention

CALLS: Final = 5
_LARGER_THAN_CACHES: Final = 256 * 2**20  # bytes over which a run goes: layers are added until there are so many
_RUN_SECONDS: Final = 0.02  # of one call, about: many times what starting it takes
_RATES: Final = 4e12, 8e14  # bytes and operations per second that the length of a run is estimated from
_RANDOM_PAGES: Final = 256  # repeated: a pool of random numbers would need several pools of memory to make


@dataclass(frozen=True)
class Shape:
    """One layer's attention of sequences of one length.

    Attributes:
      num_seqs: sequences.
      context: keys that a sequence's last query sees.
      query_len: queries of a sequence, the last ones.
      heads: query heads and KV heads.
      head_dim: width of a head.
      page_size: tokens a page.
      dtype: of queries and pool.
      kv_dtype: of a quantised pool, None for dtype.
    """

    num_seqs: int
    context: int
    query_len: int = 1
    heads: tuple[int, int] = (64, 8)
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    @property
    def name(self) -> str:
        """For example prefill-4x8192-1024: 4 sequences of 8,192 tokens, of which the last 1,024 are computed."""
        parts = ["decode" if self.query_len == 1 else "prefill", f"{self.num_seqs}x{self.context}"]
        parts += [str(self.query_len)] * (1 < self.query_len < self.context)
        return "-".join(parts + ([self.kv_dtype] if self.kv_dtype else []))

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return self.num_seqs * self.query_len, self.heads[0], self.head_dim

    @property
    def pool_dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.kv_dtype or self.dtype))

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences, with their scales."""
        scale = 4 if self.pool_dtype in QUANTISED_DTYPES else 0
        return self.num_seqs * self.context * self.heads[1] * 2 * (self.head_dim * self.pool_dtype.itemsize + scale)

    @property
    def bytes(self) -> int:
        """What must be moved: keys, values and queries once, the output once."""
        return self.kv_bytes + 2 * int(np.prod(self.q_shape)) * np.dtype(jnp.dtype(self.dtype)).itemsize

    @property
    def flops(self) -> int:
        """Of the two products, over what is visible."""
        seen = self.query_len * (self.context - self.query_len) + self.query_len * (self.query_len + 1) // 2
        return 4 * self.num_seqs * seen * self.heads[0] * self.head_dim

    @property
    def repeats(self) -> int:
        """How often it runs in one call."""
        seconds = max(self.bytes / _RATES[0], self.flops / _RATES[1])
        return int(np.clip(_RUN_SECONDS / seconds, 2, 200))


def measure(run: Callable[..., Any], *operands: Any) -> tuple[float, float, Any]:
    """Median seconds of a call of `run`, seconds that compiling it took, and its result."""
    started = time.perf_counter()
    compiled = jax.jit(run).lower(*operands).compile()
    compiling = time.perf_counter() - started
    result = jax.block_until_ready(compiled(*operands))
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append(time.perf_counter() - started)
    return statistics.median(times), compiling, result


def time_attention(shape: Shape, attend: Callable[..., Array], *operands: Any) -> dict[str, Any]:
    """The row of a shape: `attend(index of the run, q, *operands) -> out`, where q is the output of the run before."""
    q = normal(0, shape.q_shape, shape.dtype)

    def run(q: Array, *operands: Any) -> Array:
        return lax.fori_loop(0, shape.repeats, lambda index, q: attend(jnp.int32(index), q, *operands), q)

    seconds, compiling, out = measure(run, q, *operands)
    assert np.isfinite(np.asarray(out, np.float32)).all(), "the result is not finite"
    return row(shape, seconds / shape.repeats) | {"compile_seconds": compiling}


def row(shape: Shape, seconds: float) -> dict[str, Any]:
    """What is reported of a timing."""
    return {"name": shape.name, "seconds": seconds, "bytes": shape.bytes, "flops": shape.flops}


def paged(shape: Shape, implementation: str | None = None) -> dict[str, Any]:
    """Ours over permuted pages of several layers; with `implementation` another one, compared with the default's."""
    num_layers = max(1, min(64, _LARGER_THAN_CACHES // shape.kv_bytes))
    pages_per_seq = -(-shape.context // shape.page_size)
    num_pages = shape.num_seqs * pages_per_seq + 1
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
    scales = None
    if shape.pool_dtype in QUANTISED_DTYPES:
        scales = jnp.full((num_layers * num_pages, shape.heads[1] * 2, shape.page_size), 0.01, jnp.float32)
    operands = (
        pool(num_layers * num_pages, (shape.page_size, shape.heads[1] * 2 * shape.head_dim), shape.pool_dtype),
        scales,
        jnp.asarray(ids.reshape(shape.num_seqs, pages_per_seq)),
        jnp.full(shape.num_seqs, shape.context, jnp.int32),
        jnp.arange(shape.num_seqs + 1, dtype=jnp.int32) * shape.query_len,
    )

    def attend(implementation: str, index: Array, q: Array, pool: Array, scales: Any, *tables: Array) -> Array:
        return paged_attention(
            q, pool, *tables, row_offset=lax.rem(index, jnp.int32(num_layers)) * num_pages,
            num_kv_heads=shape.heads[1], scale=shape.head_dim**-0.5, max_query_len=shape.query_len, kv_scales=scales,
            implementation=implementation,
        )  # fmt: skip

    default = default_implementation()
    found = time_attention(shape, partial(attend, implementation or default), *operands)
    if implementation is not None:
        q = normal(1, shape.q_shape, shape.dtype)
        one, other = (
            np.asarray(jax.jit(partial(attend, name))(jnp.int32(0), q, *operands), np.float32)
            for name in (default, implementation)
        )
        found["largest_difference"] = float(np.abs(one - other).max())
    return found


def contiguous(shape: Shape) -> dict[str, Any]:
    """`jax.nn.dot_product_attention` over a contiguous cache, by cuDNN where a GPU prefills; no context before it."""
    assert shape.query_len in (1, shape.context), "masks of chunks differ between implementations"
    k, v = (normal(i, (shape.num_seqs, shape.context, shape.heads[1], shape.head_dim), shape.dtype) for i in (1, 2))
    by_cudnn = jax.default_backend() == "gpu" and shape.query_len > 1

    def attend(_: Array, q: Array, k: Array, v: Array) -> Array:
        out = jax.nn.dot_product_attention(
            q.reshape(shape.num_seqs, shape.query_len, *q.shape[1:]), k, v, is_causal=shape.query_len > 1,
            implementation="cudnn" if by_cudnn else "xla",
        )  # fmt: skip
        return out.reshape(q.shape)

    return time_attention(shape, attend, k, v)


def jax_kernel(shape: Shape) -> dict[str, Any]:
    """JAX's own paged kernel in decode: Triton on a GPU (deprecated there), ragged_paged_attention on a TPU."""
    num_kv_heads = shape.heads[1]
    pages_per_seq = -(-shape.context // shape.page_size)
    num_pages = shape.num_seqs * pages_per_seq
    ids = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    tables = jnp.asarray(ids.reshape(shape.num_seqs, pages_per_seq))
    lens = jnp.full(shape.num_seqs, shape.context, jnp.int32)
    if jax.default_backend() == "gpu":
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as triton

        tail = num_pages, shape.page_size, shape.head_dim
        k, v = (pool(num_kv_heads, tail, shape.pool_dtype) for _ in range(2))
        return time_attention(shape, lambda _, q, *operands: triton(q, *operands), k, v, tables, lens)
    if jax.default_backend() == "tpu":
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as ragged

        pages = pool(num_pages, (shape.page_size, 2 * num_kv_heads, shape.head_dim), shape.pool_dtype)
        starts = jnp.arange(shape.num_seqs + 1, dtype=jnp.int32)
        count = jnp.array([shape.num_seqs], jnp.int32)
        return time_attention(shape, lambda _, q, *operands: ragged(q, *operands), pages, lens, tables, starts, count)
    return {"name": shape.name, "skipped": f"JAX has no kernel for {jax.default_backend()}"}


def torch(shape: Shape) -> dict[str, Any]:
    """torch's scaled_dot_product_attention over a contiguous cache."""
    if jax.default_backend() != "gpu" or find_spec("torch") is None:
        return {"name": shape.name, "skipped": "no torch on a GPU here"}
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def random(heads: int, tokens: int) -> Any:
        shape_of = shape.num_seqs, heads, tokens, shape.head_dim
        return torch.randn(shape_of, dtype=getattr(torch, shape.dtype), device="cuda")

    q = random(shape.heads[0], shape.query_len)
    k, v = (random(shape.heads[1], shape.context) for _ in range(2))
    times = []
    for _ in range(CALLS + 1):  # the first one warms up
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(shape.repeats):
            scaled_dot_product_attention(q, k, v, is_causal=shape.query_len > 1, enable_gqa=True)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / shape.repeats)
    return row(shape, statistics.median(times[1:]))


def normal(seed: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Normal random numbers; codes of an 8-bit dtype are round numbers up to 127."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return jnp.clip(jnp.round(x * 32), -127, 127).astype(dtype) if dtype in QUANTISED_DTYPES else x.astype(dtype)


def pool(rows: int, tail: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array [rows, *tail] whose rows are some random ones over and over."""
    few = normal(3, (min(rows, _RANDOM_PAGES), *tail), dtype)
    return jax.jit(lambda few: few[jnp.arange(rows, dtype=jnp.int32) % few.shape[0]])(few)
