"""The contract of `paged_attention`, kept by the TPU kernel in the interpreter; see also the suites of all others.

Interpreting costs seconds a case, most of it compiling, so the default run holds few shapes and cases.
"""

from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from scripts.kernels.cases import (
    NO_WINDOW,
    SEED,
    Case,
    assert_contract,
    attend,
    build,
    check,
    operands,
    oracle,
)
from scripts.kernels.sampling import KERNEL_GEOMETRIES, Factors, full, sample
from tests.pallas_kernels.mosaic_tpu.interpret import MODES, interpreted

pytestmark = pytest.mark.timeout(500)  # a semaphore that is never signalled waits for ever

GEOMETRY: Final = KERNEL_GEOMETRIES["mosaic_tpu"]
_SMALL: Final[Factors] = {
    **GEOMETRY,
    "heads": ((4, 4), (9, 3), (14, 2), (8, 1)),
    "head_dim": (64, 128),
    "page_size": (16, 64),
    "layers": ((2, 0), (3, 2)),
}
_NUM_GEOMETRIES: Final = 3
SAMPLE = sample(num_geometries=_NUM_GEOMETRIES, count=6, seed=SEED, geometry=_SMALL)

# Contexts that fill the ring more than once, so that slots are used again; sequences of several blocks and tiles.
_LONG = Case(query_lens=(), seq_lens=(), page_size=16, num_heads=2, num_kv_heads=1, head_dim=64, pages_per_seq=200)
LONG = {
    "decode": replace(_LONG, query_lens=(1,) * 5, seq_lens=(2300, 0, 513, 1, 256), max_query_len=1),
    # Tiles of 128 tokens: a whole one, and ones that sequences share in windows of 16 tokens.
    "prefill": replace(_LONG, query_lens=(150, 1, 3, 120, 0, 1), seq_lens=(150, 1300, 40, 700, 9, 257), num_heads=4),
}
LONG_WINDOWED = {
    "decode": replace(LONG["decode"], sliding_window=300),
    "prefill": replace(LONG["prefill"], sliding_window=40, padding_rows=0),
}
_QUANTISED = Case(
    query_lens=(1, 17, 1, 3), seq_lens=(300, 17, 128, 513), page_size=128, num_heads=6, num_kv_heads=2, head_dim=64,
    padding_seqs=1, max_query_len=20,
)  # fmt: skip


@pytest.mark.parametrize("index", range(len(SAMPLE)))
def test_pairwise_sample(index: int) -> None:
    with interpreted(MODES[index % _NUM_GEOMETRIES % 2]):  # a shape in one mode only: each compiles anew
        assert_contract(SAMPLE[index], "mosaic_tpu")


@pytest.mark.parametrize(
    ("name", "mode"), [("decode", "eager"), pytest.param("prefill", "on_wait", marks=pytest.mark.slow)]
)
def test_ring_is_used_again(name: str, mode: str) -> None:
    with interpreted(mode):
        assert_contract(LONG[name], "mosaic_tpu")


def test_quantised_pool() -> None:
    with interpreted("on_wait"):
        assert_contract(replace(_QUANTISED, kv_dtype="int8", dtype="bfloat16"), "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize("cases", [LONG, LONG_WINDOWED], ids=["no-window", "window"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts_in_full(dtype: str, cases: dict[str, Case], name: str, mode: str) -> None:
    with interpreted(mode):
        assert_contract(replace(cases[name], dtype=dtype), "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pools_in_full(kv_dtype: str, dtype: str, mode: str) -> None:
    case = replace(_QUANTISED, kv_dtype=kv_dtype, dtype=dtype)
    with interpreted(mode):
        assert_contract(case, "mosaic_tpu")
        assert_contract(replace(case, head_dim=128, sliding_window=130, query_lens=(1, 0, 1, 1)), "mosaic_tpu")
        assert_contract(replace(case, query_lens=(1,) * 4, max_query_len=1, sliding_window=33), "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_full_matrix() -> None:
    for index, case in enumerate(full(SEED, GEOMETRY)):
        with interpreted(MODES[index % 2]):
            assert_contract(case, "mosaic_tpu")


@pytest.mark.slow
def test_window_of_everything_is_no_window() -> None:
    case = Case(query_lens=(1, 6), seq_lens=(11, 9), page_size=8, head_dim=64)
    with interpreted("on_wait"):
        for window in (NO_WINDOW, NO_WINDOW - 1, 11):
            assert_contract(replace(case, sliding_window=window), "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.parametrize(("query_dtype", "pool_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_pool_of_another_dtype(query_dtype: str, pool_dtype: str) -> None:
    case = Case(query_lens=(1, 5), seq_lens=(30, 9), page_size=8, head_dim=64, dtype=query_dtype)
    inputs = build(replace(case, dtype=pool_dtype))
    inputs = inputs._replace(q=inputs.q.astype(jnp.dtype(query_dtype)))
    with interpreted("eager"):
        out, lse = attend(case, inputs, "mosaic_tpu")
    check(case, oracle(case, inputs), out, lse, f"mosaic_tpu, pool {pool_dtype}")


@pytest.mark.slow
def test_scan_over_layers() -> None:
    """One program for all layers: row_offset is the scan's operand and every layer holds other values."""
    case = Case(query_lens=(1, 5), seq_lens=(30, 9), page_size=8, head_dim=64, num_layers=3, num_pages=20)
    layers = [build(replace(case, layer=layer)) for layer in range(3)]
    rows = np.arange(3 * 20) // 20
    pool = np.select([(rows == layer)[:, None, None] for layer in range(3)], [x.kv_pages for x in layers])
    q, _, *tables = operands(layers[0])

    def layer(_: None, index: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, paged_attention(
            q, jnp.asarray(pool), *tables, row_offset=index * jnp.int32(20), num_kv_heads=case.num_kv_heads,
            scale=case.scale, max_query_len=5, return_lse=True, implementation="mosaic_tpu",
        )  # fmt: skip

    with interpreted("on_wait"):
        out, lse = map(np.asarray, jax.lax.scan(layer, None, jnp.arange(3, dtype=jnp.int32))[1])
    for index in range(3):
        check(case, oracle(case, layers[index]), out[index], lse[index], f"mosaic_tpu, layer {index}")
