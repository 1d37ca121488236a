"""The contract of the Mosaic GPU kernels, interpreted on the CPU with race detection.

The interpreter checks numbers, copies, barriers and shared memory, not layouts nor what only the hardware does; see
docs/kernels.md.
"""

import random
from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from scripts.kernels.cases import NO_WINDOW, SEED, Case, assert_contract, build, check, operands, oracle
from scripts.kernels.sampling import KERNEL_GEOMETRIES, PROFILE, make_case, pairwise
from tests.pallas_kernels.interpret_gpu import interpreted

# The interpreter runs each warpgroup in a thread that waits inside XLA; with fewer of XLA's own threads than warpgroups
# (a machine of two cores) it was seen to hang by itself, so none of this is in the default run. A hang is inside XLA,
# where no signal reaches: the timeout ends the process.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600, method="thread")]

GEOMETRY: Final = KERNEL_GEOMETRIES["mosaic_gpu"]

_LONG: Final = Case(
    query_lens=(1, 1, 1, 1), seq_lens=(1000, 513, 0, 777), page_size=64, num_heads=4, num_kv_heads=1, head_dim=128,
    dtype="bfloat16", num_layers=2, layer=1, max_query_len=1,
)  # fmt: skip
LONG: Final = {
    # More tiles a block than the ring has stages: each stage is refilled several times.
    "decode": _LONG,
    "prefill": Case(
        query_lens=(30, 1, 0, 24), seq_lens=(650, 300, 777, 24), page_size=64, num_heads=4, num_kv_heads=1,
        head_dim=64, dtype="bfloat16", max_query_len=30, padding_rows=3,
    ),
}  # fmt: skip


_QUANTISED: Final = Case(
    query_lens=(1, 24, 0, 1), seq_lens=(700, 70, 33, 0), num_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16",
    num_layers=2, layer=1, max_query_len=24,
)  # fmt: skip
QUANTISED: Final = {
    # Scales that come with the pages, through a ring that wraps; scales that XLA gathers by key.
    "copied scales": replace(_QUANTISED, page_size=32, kv_dtype="float8_e4m3fn"),
    "gathered scales": replace(_QUANTISED, page_size=16, kv_dtype="int8", dtype="float16", sliding_window=60),
}


def sample(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    choices = pairwise({**GEOMETRY, **PROFILE}, count, rng)
    return [make_case(choice, rng) for choice in choices]


@pytest.mark.parametrize("index", range(6))
def test_pairwise_sample(index: int) -> None:
    with interpreted():
        assert_contract(sample(6, SEED)[index], "mosaic_gpu")


@pytest.mark.parametrize("name", LONG)
def test_a_ring_that_wraps(name: str) -> None:
    with interpreted():
        assert_contract(LONG[name], "mosaic_gpu")


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_pools(name: str) -> None:
    with interpreted():
        assert_contract(QUANTISED[name], "mosaic_gpu")


@pytest.mark.parametrize("index", range(100))
def test_full_sample(index: int) -> None:
    with interpreted():
        assert_contract(sample(100, SEED)[index], "mosaic_gpu")


def test_inside_a_scan_over_layers() -> None:
    """The layer's offset and the window are traced, and change from one iteration to the next."""
    windows = (NO_WINDOW, 20)
    case = Case(
        query_lens=(1, 2), seq_lens=(70, 9), page_size=32, num_heads=2, num_kv_heads=1, head_dim=64, dtype="float16",
        num_layers=2,
    )  # fmt: skip
    layers = [build(Case(**{**vars(case), "layer": i, "sliding_window": w})) for i, w in enumerate(windows)]
    num_pages = layers[1].row_offset
    pool = jnp.concatenate([jnp.asarray(x.kv_pages[i * num_pages : (i + 1) * num_pages]) for i, x in enumerate(layers)])
    q, _, *tables = operands(layers[0])

    @jax.jit
    def both(q: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
            offset, window = xs
            return None, paged_attention(
                q, pool, *tables, row_offset=offset, num_kv_heads=1, scale=case.scale, max_query_len=2,
                sliding_window=window, return_lse=True, implementation="mosaic_gpu",
            )  # fmt: skip

        xs = jnp.array([0, num_pages], jnp.int32), jnp.array(windows, jnp.int32)
        return jax.lax.scan(layer, None, xs)[1]

    with interpreted():
        outs, lses = (np.asarray(x) for x in both(q, pool))
    for i, (inputs, window) in enumerate(zip(layers, windows, strict=True)):
        of_layer = Case(**{**vars(case), "layer": i, "sliding_window": window})
        check(of_layer, oracle(of_layer, inputs), outs[i], lses[i], "mosaic_gpu in a scan", rounded_weights=True)
