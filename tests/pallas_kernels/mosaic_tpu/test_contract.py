"""The contract of `paged_attention`, kept by the TPU kernel in the interpreter; see also the suites of all others.

Interpreting costs seconds a case, most of it compiling, so the default run holds few shapes and cases.
"""

from dataclasses import replace
from typing import Final

import pytest

from tests.pallas_kernels.cases import NO_WINDOW, SEED, Case, assert_contract
from tests.pallas_kernels.mosaic_tpu.interpret import MODES, interpreted
from tests.pallas_kernels.sampling import Factors, full, sample

pytestmark = pytest.mark.timeout(500)  # a semaphore that is never signalled waits for ever

GEOMETRY: Final[Factors] = {
    "heads": ((4, 4), (9, 3), (14, 2), (8, 1), (40, 10)),
    "head_dim": (64, 128, 256),
    "page_size": (8, 16, 64, 128),
    "dtype": ("float32", "bfloat16"),
    "kv_dtype": (None,),
    "logit_soft_cap": (None, 2.0),
    "layers": ((1, 0), (2, 0), (3, 2)),
    "traced_offset": (True, False),
    "max_query_len": (1, 24, 2048),
    "extra_pages": (0, 3),
}
_SMALL: Final[Factors] = {
    **GEOMETRY,
    "heads": ((4, 4), (9, 3), (14, 2), (8, 1)),
    "head_dim": (64, 128),
    "page_size": (16, 64),
    "layers": ((2, 0), (3, 2)),
}
SAMPLE = sample(num_geometries=4, count=12, seed=SEED, geometry=_SMALL)

# Contexts that fill the ring several times over, so that slots are used again; pages of several blocks and tiles.
_LONG = Case(query_lens=(), seq_lens=(), page_size=16, num_heads=2, num_kv_heads=1, head_dim=64, pages_per_seq=200)
RING = {
    "decode": replace(_LONG, query_lens=(1,) * 6, seq_lens=(2600, 0, 513, 1, 256, 777), max_query_len=1),
    "decode-window": replace(
        _LONG, query_lens=(1,) * 6, seq_lens=(2600, 0, 513, 1, 256, 777), max_query_len=1, sliding_window=300
    ),
    # Tiles of 128 tokens: whole ones, ones that sequences share, and windows of 16 tokens in them.
    "prefill": replace(_LONG, query_lens=(150, 1, 3, 120, 0, 1), seq_lens=(150, 1300, 40, 700, 9, 257), num_heads=4),
}
RING["prefill-window"] = replace(RING["prefill"], sliding_window=40, padding_rows=0)


@pytest.mark.parametrize("index", range(len(SAMPLE)))
def test_pairwise_sample(index: int) -> None:
    # All cases of one shape in one mode: a mode compiles anew.
    with interpreted(MODES[index % 4 % 2]):
        assert_contract(SAMPLE[index], "mosaic_tpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_ring_is_used_again(name: str, mode: str) -> None:
    with interpreted(mode):
        assert_contract(RING[name], "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ring_in_full(name: str, mode: str, dtype: str) -> None:
    with interpreted(mode):
        assert_contract(replace(RING[name], dtype=dtype), "mosaic_tpu")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_full_matrix() -> None:
    for index, case in enumerate(full(SEED, GEOMETRY)):
        with interpreted(MODES[index % 2]):
            assert_contract(case, "mosaic_tpu")


def test_window_of_everything_is_no_window() -> None:
    case = Case(query_lens=(1, 6), seq_lens=(11, 9), page_size=8, head_dim=64)
    with interpreted("on_wait"):
        for window in (NO_WINDOW, NO_WINDOW - 1, 11):
            assert_contract(replace(case, sliding_window=window), "mosaic_tpu")
