"""Cases of the contract: what a batch looks like, its arrays, and what attention must give.

The oracle is NumPy in float64 and shares nothing with the implementations: it never sees pages, only each sequence's
contiguous keys and values, one query and one KV head at a time.
"""

import os
import random
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels import IMPLEMENTATIONS, paged_attention

KERNELS: Final = tuple(name for name in sorted(IMPLEMENTATIONS) if name.startswith("mosaic_"))
"""Those that need hardware or an interpreter, and take some shapes only; they have suites of their own."""

CONTRACT: Final = tuple(name for name in sorted(IMPLEMENTATIONS) if name not in KERNELS)
"""Every implementation that this suite holds to the contract; the one place that says so."""

SCALABLE: Final = tuple(name for name in CONTRACT if name != "reference")
"""Those that promise cost by the real lengths; the reference gathers queries x table."""

SEED: Final = int(os.environ.get("PAGED_JAX_SEED") or random.SystemRandom().randrange(2**32))
"""Fresh in every run; set PAGED_JAX_SEED to repeat one."""

NO_WINDOW: Final = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """One batch over one layer of a pool.

    Attributes:
      query_lens: queries of each live sequence.
      seq_lens: keys of each live sequence; at least its queries, or 0.
      page_size: tokens a page.
      num_heads: query heads.
      num_kv_heads: KV heads.
      head_dim: width of a head.
      dtype: of queries and pool.
      kv_dtype: of a quantised pool; None for dtype.
      sliding_window: keys a query looks back on; NO_WINDOW for all. Always an operand.
      logit_soft_cap: static cap or None.
      pages_per_seq: table width, at least what the longest sequence needs; None for that.
      num_pages: pages of a layer, at least what all need; None for a few more than that.
      num_layers: layers of the pool.
      layer: the layer that holds the data; all others are poison.
      traced_offset: whether `row_offset` is an operand or a Python int.
      padding_seqs: rows of the table past the live ones, with length 0 and the last cumulative query length.
      padding_rows: rows of q past the last query.
      max_query_len: static bound; None for the longest query length.
      shared_prefix: whether all sequences' leading full pages are those of the first one, the same page ids.
      sharpness: factor on the logits; above 20 a softmax without its running maximum overflows.
      seed: of the values and of the page ids.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    sliding_window: int = NO_WINDOW
    logit_soft_cap: float | None = None
    pages_per_seq: int | None = None
    num_pages: int | None = None
    num_layers: int = 1
    layer: int = 0
    traced_offset: bool = True
    padding_seqs: int = 0
    padding_rows: int = 0
    max_query_len: int | None = None
    shared_prefix: bool = False
    sharpness: float = 1.0
    seed: int = SEED

    @property
    def scale(self) -> float:
        return float(np.float32(self.sharpness * self.head_dim**-0.5))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding_rows

    @property
    def pages_needed(self) -> tuple[int, ...]:
        return tuple(-(-n // self.page_size) for n in self.seq_lens)


class Inputs(NamedTuple):
    """The arrays of a case, and the contiguous keys and values that the pool stands for (float64, [seq_len,
    num_kv_heads, head_dim])."""

    q: npt.NDArray[Any]
    kv_pages: npt.NDArray[Any]
    block_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    cu_query_lens: npt.NDArray[np.int32]
    row_offset: int
    keys: list[npt.NDArray[np.float64]]
    values: list[npt.NDArray[np.float64]]
    kv_scales: npt.NDArray[np.float32] | None = None


class Expected(NamedTuple):
    """The oracle's result, with what the tolerance is measured by."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    largest_value: npt.NDArray[np.float64]
    """max |v| over what a row sees, [num_tokens, num_heads]; 0 where it sees nothing."""
    largest_logit: npt.NDArray[np.float64]
    mean_magnitude: npt.NDArray[np.float64]
    """The average of |v| with the row's weights, [num_tokens, num_heads, head_dim]."""


def build(case: Case, *, poison: bool = True) -> Inputs:
    """The arrays of a case.

    With `poison`, everything that the contract says is not read holds what would be seen if it were: NaN in the null
    page, in slots past a sequence's length, in pages of nobody, in all other layers and in padding rows of q (of a
    quantised pool also in the scales; int8 has no NaN, so there the codes are the most extreme ones); garbage ids
    (other sequences' pages, ids out of range) in the table past each sequence's last page. Without, the same batch
    is clean: zeros everywhere, the null page in the table. Page ids are permuted in both.
    """
    dtype = np.dtype(jnp.dtype(case.dtype))
    kv_dtype = np.dtype(jnp.dtype(case.kv_dtype or case.dtype))
    ids = np.random.default_rng((case.seed, 1))
    values_rng = np.random.default_rng((case.seed, 2, case.layer))
    queries_rng = np.random.default_rng((case.seed, 3))
    page, heads, dim = case.page_size, case.num_kv_heads, case.head_dim
    num_live = len(case.seq_lens)
    num_seqs = num_live + case.padding_seqs

    num_pages = case.num_pages or sum(case.pages_needed) + 4
    free = (1 + ids.permutation(num_pages - 1)).tolist()
    tables: list[list[int]] = []
    keys: list[npt.NDArray[np.float64]] = []
    values: list[npt.NDArray[np.float64]] = []
    for s, length in enumerate(case.seq_lens):
        k, v = (values_rng.standard_normal((length, heads, dim)).astype(dtype).astype(np.float64) for _ in range(2))
        shared = min(length, case.seq_lens[0]) // page if case.shared_prefix and s else 0
        if shared:
            k[: shared * page] = keys[0][: shared * page]
            v[: shared * page] = values[0][: shared * page]
        tables.append(
            (tables[0][:shared] if shared else []) + [free.pop() for _ in range(case.pages_needed[s] - shared)]
        )
        keys.append(k)
        values.append(v)

    fill = np.nan if poison else 0.0
    kv_fill = np.where(ids.random(dim) < 0.5, -128, 127) if poison and kv_dtype == np.int8 else fill
    pool = np.empty((case.num_layers, num_pages, page, heads, 2, dim), kv_dtype)
    pool[:] = np.asarray(kv_fill).astype(kv_dtype)
    scales = np.full((case.num_layers, num_pages, heads, 2, page), fill, np.float32)
    for table, *kv in zip(tables, keys, values, strict=True):
        position = np.arange(len(kv[0]))
        place = case.layer, np.asarray(table, np.int64)[position // page]
        for i, x in enumerate(kv):
            codes = x
            if case.kv_dtype is not None:
                codes, scale = quantised(x, case.kv_dtype)
                scales[*place, :, i, position % page] = scale
                x[:] = codes.astype(np.float64) * scale[..., None]
            pool[*place, position % page, :, i] = codes

    width = case.pages_per_seq or max(1, *case.pages_needed, 1)
    garbage = ids.integers(0, num_pages, (num_seqs, width))
    wild = ids.choice([-1, 2**30, -(2**31), 2**31 - 1, num_pages * case.num_layers], (num_seqs, width))
    garbage = np.where(ids.random((num_seqs, width)) < 0.5, garbage, wild)
    block_tables = (garbage if poison else np.zeros_like(garbage)).astype(np.int32)
    for s, table in enumerate(tables):
        block_tables[s, : len(table)] = table

    q = queries_rng.standard_normal((case.num_tokens, case.num_heads, dim)).astype(dtype)
    q[sum(case.query_lens) :] = fill
    cu_query_lens = np.zeros(num_seqs + 1, np.int32)
    cu_query_lens[1 : num_live + 1] = np.cumsum(case.query_lens)
    cu_query_lens[num_live + 1 :] = sum(case.query_lens)
    seq_lens = np.zeros(num_seqs, np.int32)
    seq_lens[:num_live] = case.seq_lens
    kv_pages = pool.reshape(case.num_layers * num_pages, page, heads * 2 * dim)
    kv_scales = None if case.kv_dtype is None else scales.reshape(case.num_layers * num_pages, heads * 2, page)
    return Inputs(q, kv_pages, block_tables, seq_lens, cu_query_lens, case.layer * num_pages, keys, values, kv_scales)


def quantised(x: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Codes and scales of x[..., head_dim], by the largest magnitude and rounding to nearest; no row is zeros."""
    scale = (np.abs(x).max(axis=-1) / {"int8": 127.0, "float8_e4m3fn": 448.0}[dtype]).astype(np.float32)
    codes = (x / scale[..., None]).astype(np.float32)
    return (np.rint(codes) if dtype == "int8" else codes).astype(jnp.dtype(dtype)), scale


def oracle(case: Case, inputs: Inputs) -> Expected:
    """Attention by the book, in float64, over contiguous keys and values."""
    group = case.num_heads // case.num_kv_heads
    out = np.zeros((case.num_tokens, case.num_heads, case.head_dim))
    lse = np.full((case.num_tokens, case.num_heads), -np.inf)
    largest_value, largest_logit, mean_magnitude = np.zeros_like(lse), np.zeros_like(lse), np.zeros_like(out)
    row = 0
    for s, query_len in enumerate(case.query_lens):
        for i in range(query_len):
            position = case.seq_lens[s] - query_len + i
            first = max(0, position - case.sliding_window + 1)
            if case.seq_lens[s] > 0:
                for h in range(case.num_kv_heads):
                    k = inputs.keys[s][first : position + 1, h]
                    v = inputs.values[s][first : position + 1, h]
                    of_group = slice(h * group, (h + 1) * group)
                    logits = inputs.q[row, of_group].astype(np.float64) @ k.T * case.scale
                    if case.logit_soft_cap is not None:
                        logits = case.logit_soft_cap * np.tanh(logits / case.logit_soft_cap)
                    peak = logits.max(axis=1, keepdims=True)
                    weights = np.exp(logits - peak)
                    total = weights.sum(axis=1, keepdims=True)
                    out[row, of_group] = weights / total @ v
                    lse[row, of_group] = (peak + np.log(total))[:, 0]
                    mean_magnitude[row, of_group] = weights / total @ np.abs(v)
                    largest_value[row, of_group] = np.abs(v).max()
                    largest_logit[row, of_group] = np.abs(logits).max(axis=1)
            row += 1
    return Expected(out, lse, largest_value, largest_logit, mean_magnitude)


ACCUMULATION: Final = 1e-5
ROUNDING: Final = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def check(
    case: Case,
    expected: Expected,
    out: npt.NDArray[Any],
    lse: npt.NDArray[Any],
    label: str,
    rounded_weights: bool = False,
) -> None:
    """Asserts that a result is the oracle's within what its arithmetic can lose; exactly zero where nothing is seen.

    With u = 2**-24 (half an ulp of float32):
    - Inputs are rounded to the case's dtype, or quantised, before the oracle sees them, and a product of two bfloat16
      or float16 numbers is exact in float32. So whatever the dtype, the error before the final cast is that of float32.
    - A logit is a sum of head_dim products: rounding wanders by about sqrt(head_dim) * u * |logit|. A logit's error
      is its weight's relative error, in the numerator and in the total: twice that, times max |v|. The sums over n
      keys add sqrt(n) * u * max |v|. For head_dim 256, 1000 keys and the logits of unit normal vectors (below 4 in
      units of the scale, over the keys of a case): (2 * 16 * 4 + 32) * u = 9.5e-6. Hence 1e-5 of the row's scale,
      max |v| over what the row sees, and in proportion where logits exceed 4.
    - The cast to the output's dtype rounds to nearest: half an ulp is at most 2**-8 of the number itself for bfloat16
      (8 significant bits), 2**-11 for float16, u for float32.
    - The log-sum-exp is float32 and as exact as the largest logit: 1e-5 of max(1, |logit|).

    - With `rounded_weights`, weights may be rounded to the case's dtype before the second product, as tensor cores
      want them: at most that half ulp of each weight, so that much of the weighted average of |v|. The total and the
      log-sum-exp keep the float32 weights.
    """
    message = f"{label}: {case}; repeat with PAGED_JAX_SEED={SEED}"
    assert out.dtype == jnp.dtype(case.dtype), message
    assert lse.dtype == np.float32, message
    assert out.shape == expected.out.shape, message
    assert lse.shape == expected.lse.shape, message
    sees_nothing = np.isneginf(expected.lse)
    assert (np.isneginf(lse) == sees_nothing).all(), f"lse must be -inf exactly where nothing is seen; {message}"
    assert (out[sees_nothing] == 0).all(), f"rows that see nothing must be zeros; {message}"
    assert np.isfinite(out.astype(np.float64)).all(), f"not finite; {message}"

    loss = ACCUMULATION * np.maximum(1.0, expected.largest_logit / 4)
    bound = (loss * expected.largest_value)[..., None] + ROUNDING[case.dtype] * np.abs(expected.out)
    if rounded_weights:
        bound += ROUNDING[case.dtype] * expected.mean_magnitude
    error = np.abs(out.astype(np.float64) - expected.out)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert (error <= bound).all(), (
        f"out{list(map(int, worst))} is off by {error[worst]:.3g} > {bound[worst]:.3g}; {message}"
    )

    seen = ~sees_nothing
    lse_error = np.abs(lse[seen].astype(np.float64) - expected.lse[seen])
    lse_bound = ACCUMULATION * np.maximum(1.0, expected.largest_logit[seen])
    assert (lse_error <= lse_bound).all(), f"lse is off by {(lse_error / lse_bound).max():.3g} bounds; {message}"


@cache
def compiled(
    implementation: str, num_kv_heads: int, max_query_len: int, soft_cap: float | None, row_offset: int | None
) -> Any:
    """The operation under jit, with lse; `row_offset` an operand where None."""
    static: dict[str, Any] = {} if row_offset is None else {"row_offset": row_offset}
    return jax.jit(
        partial(
            paged_attention,
            num_kv_heads=num_kv_heads,
            max_query_len=max_query_len,
            logit_soft_cap=soft_cap,
            return_lse=True,
            implementation=implementation,
            **static,
        )
    )


def operands(inputs: Inputs) -> tuple[jax.Array, ...]:
    """The positional arguments, as JAX arrays."""
    return tuple(map(jnp.asarray, inputs[:5]))


def scales_of(inputs: Inputs) -> dict[str, jax.Array]:
    """The keyword argument that a quantised pool adds."""
    return {} if inputs.kv_scales is None else {"kv_scales": jnp.asarray(inputs.kv_scales)}


def attend(case: Case, inputs: Inputs, implementation: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(out, lse) of an implementation; scale, window and (by the case) row_offset are operands."""
    function = compiled(
        implementation,
        case.num_kv_heads,
        case.max_query_len or max(1, *case.query_lens, 1),
        case.logit_soft_cap,
        None if case.traced_offset else inputs.row_offset,
    )
    traced = scales_of(inputs)
    if case.traced_offset:
        traced["row_offset"] = jnp.int32(inputs.row_offset)
    out, lse = function(
        *operands(inputs), scale=jnp.float32(case.scale), sliding_window=jnp.int32(case.sliding_window), **traced
    )
    return np.asarray(out), np.asarray(lse)


def same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays are equal bit by bit, NaNs and signs of zero included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_contract(case: Case, implementation: str) -> None:
    """The contract on one case: right by the oracle on a poisoned pool, and no bit of the poison in the result."""
    inputs = build(case)
    out, lse = attend(case, inputs, implementation)
    check(case, oracle(case, inputs), out, lse, implementation, rounded_weights=implementation in KERNELS)
    clean_out, clean_lse = attend(case, build(case, poison=False), implementation)
    where = f"{implementation}: {case}; repeat with PAGED_JAX_SEED={SEED}"
    assert same_bytes(out, clean_out), f"slots or table entries of nobody change the output; {where}"
    assert same_bytes(lse, clean_lse), f"slots or table entries of nobody change the lse; {where}"
