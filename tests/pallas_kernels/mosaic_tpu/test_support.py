"""What the TPU kernel refuses, before anything is traced; its work list; its sizes."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.mosaic_tpu import sizes, work
from tests.pallas_kernels.mosaic_tpu.interpret import interpreted

F32, BF16 = jnp.float32, jnp.bfloat16


def arguments(
    *, head_dim: int = 64, page_size: int = 16, heads: int = 4, table: tuple[int, int] = (2, 3), dtype: Any = F32,
    pool_dtype: Any = None, max_query_len: int = 2,
) -> dict[str, Any]:  # fmt: skip
    pool = jax.ShapeDtypeStruct((6, page_size, 2 * 2 * head_dim), pool_dtype or dtype)
    quantised = pool.dtype.itemsize == 1
    return {
        "q": jax.ShapeDtypeStruct((3, heads, head_dim), dtype),
        "kv_pages": pool,
        "block_tables": jax.ShapeDtypeStruct(table, jnp.int32),
        "seq_lens": jax.ShapeDtypeStruct(table[:1], jnp.int32),
        "cu_query_lens": jax.ShapeDtypeStruct((table[0] + 1,), jnp.int32),
        "kv_scales": jax.ShapeDtypeStruct((6, 4, page_size), F32) if quantised else None,
        "max_query_len": max_query_len,
    }


def call(max_query_len: int, **operands: Any) -> Any:
    def attend(operands: dict[str, Any]) -> Any:
        return paged_attention(
            **operands, row_offset=0, num_kv_heads=2, scale=1.0, max_query_len=max_query_len,
            implementation="mosaic_tpu",
        )  # fmt: skip

    return jax.eval_shape(attend, operands)


REFUSED: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "float16": ({"dtype": jnp.float16}, ("q's dtype is float16", "float32, bfloat16")),
    "float16 pool": ({"pool_dtype": jnp.float16}, ("kv_pages' dtype is float16", "float32, bfloat16, int8")),
    "head_dim": ({"head_dim": 80}, ("head_dim is 80", "64, 128, 256", "padded_head_dim")),
    "page_size": ({"page_size": 4}, ("page_size is 4", "8, 16, 32, 64, 128")),
    "page_size of int8": ({"page_size": 16, "pool_dtype": jnp.int8}, ("page_size is 16", "128", "quantised")),
    "wide table": ({"table": (128, 2048)}, ("scalar memory", "128 x 2048", "larger pages")),
    "many heads": ({"heads": 2**14, "head_dim": 256}, ("VMEM", "16384 heads", "128 MiB")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_argument_value_support_and_remedy(name: str) -> None:
    changes, words = REFUSED[name]
    with interpreted("on_wait"), pytest.raises(ValueError) as error:
        call(**arguments(**changes))
    message = str(error.value)
    missing = [word for word in ("mosaic_tpu", "'xla' takes it", *words) if word not in message]
    assert not missing, message


def test_other_platforms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"mosaic_tpu.*platform is cpu, supported is tpu.*'xla' takes it"):
        call(**arguments())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_supported_traces(dtype: Any) -> None:
    with interpreted("on_wait"):
        assert call(**arguments(dtype=dtype)).shape == (3, 4, 64)
        assert call(**arguments(dtype=dtype, pool_dtype=jnp.int8, page_size=128)).dtype == dtype


@pytest.mark.parametrize("seed", range(20))
def test_work_items_are_what_sequences_have_in_tiles(seed: int) -> None:
    """Against plain Python, over random batches: every token of a live sequence in one item, the bound respected."""
    rng = np.random.default_rng(seed)
    num_seqs, num_tokens = 6, 6 * 60 + 3  # one shape, so that the operations compile once
    block_q, page_size = int(rng.choice([1, 32])), 16
    longest = 1 if block_q == 1 else 60
    query_lens = rng.integers(0, longest + 1, num_seqs)
    seq_lens = np.where(rng.random(num_seqs) < 0.3, 0, query_lens + rng.integers(0, 100, num_seqs))
    window = int(rng.choice([1, 20, 2**31 - 1]))
    ends = np.cumsum(query_lens)

    expected = []
    for s in range(num_seqs):
        start = int(ends[s] - query_lens[s])
        tokens = range(start, int(ends[s])) if seq_lens[s] else range(0)
        for tile in sorted({token // block_q for token in tokens}):
            rows = [token - tile * block_q for token in tokens if token // block_q == tile]
            position = int(seq_lens[s]) - int(ends[s]) + tile * block_q
            first_page = max(0, position + rows[0] - window + 1) // page_size
            end_page = -(-(position + rows[-1] + 1) // page_size)
            expected.append((s, tile, position, rows[0], rows[-1] + 1, first_page, end_page))

    most = work.max_items(num_tokens, num_seqs, block_q, longest)
    items, count = work.items(
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray([0, *ends], jnp.int32),
        jnp.int32(window),
        block_q=block_q,
        page_size=page_size,
        count=most,
    )
    assert int(count) == len(expected) <= most
    assert list(zip(*(np.asarray(field)[: len(expected)].tolist() for field in items), strict=True)) == expected
    last_tile = expected[-1][1] if expected else 0
    assert (np.asarray(items.tile)[len(expected) :] == last_tile).all(), "idle steps must not move the tile"


@pytest.mark.parametrize("budget", [12, 96])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (40, 10, 128)])
def test_sizes_fit_the_budget_and_fill_the_memory_pipe(budget: int, heads: int, kv_heads: int, head_dim: int) -> None:
    for dtype in ("float32", "bfloat16"):
        for longest in (1, 4096):
            chosen = sizes.choose(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=16, max_query_len=longest,
                query_dtype=dtype, pool_dtype=dtype, budget=budget * 2**20,
            )  # fmt: skip
            assert chosen is not None
            assert chosen.vmem_bytes <= budget * 2**20
            assert chosen.block_keys % 128 == 0
            in_flight = (chosen.slots - 1) * chosen.block_keys * chosen.lanes * np.dtype(dtype).itemsize
            assert in_flight >= 2**20, "820 GB/s times about 1 us, what a v5e has under way"
            assert chosen.block_q == 1 if longest == 1 else chosen.block_q >= 16
