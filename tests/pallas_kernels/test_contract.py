"""The contract of `paged_attention`, against the float64 oracle, for every implementation."""

import random
from dataclasses import replace

import pytest

from scripts.kernels.cases import CONTRACT, NO_WINDOW, SCALABLE, SEED, Case, assert_contract
from scripts.kernels.sampling import GEOMETRY, PROFILE, all_pairs, full, pairs_of, pairwise, sample

SAMPLE = sample(num_geometries=8, count=56, seed=SEED)

_LONG = Case(
    query_lens=(), seq_lens=(), page_size=16, num_heads=2, num_kv_heads=1, pages_per_seq=50, num_pages=90,
    num_layers=2, layer=1, max_query_len=300,
)  # fmt: skip
LONG_CHUNKS = {
    # 324 queries: several tiles of any sensible size, boundaries on and off a tile's.
    "whole-prompts": replace(_LONG, query_lens=(257, 1, 64, 2), seq_lens=(257, 1, 64, 2)),
    "chunks-after-prefix": replace(_LONG, query_lens=(0, 65, 1, 258), seq_lens=(40, 130, 17, 777)),
    "narrow-window": replace(_LONG, query_lens=(200, 63, 60, 1), seq_lens=(213, 63, 700, 33), sliding_window=17),
    "page-window": replace(_LONG, query_lens=(128, 129, 66, 1), seq_lens=(128, 129, 515, 513), sliding_window=16),
    "wide-window": replace(_LONG, query_lens=(300, 24), seq_lens=(777, 400), sliding_window=400, padding_seqs=2),
    "padding": replace(_LONG, query_lens=(100, 0), seq_lens=(100, 99), padding_rows=224, padding_seqs=2),
    "overflowing-logits": replace(_LONG, query_lens=(128, 130, 1, 65), seq_lens=(128, 600, 300, 65), sharpness=60.0),
}

_MANY = Case(query_lens=(), seq_lens=(), page_size=4, num_heads=2, num_kv_heads=1, head_dim=16, pages_per_seq=201)
MANY_DECODES = {
    # 90 sequences of up to 200 pages: more work than one launch, step or chunk holds.
    "ragged": replace(_MANY, query_lens=(1,) * 90, seq_lens=tuple((37 * s * s) % 801 for s in range(90))),
    "windowed": replace(
        _MANY, query_lens=(1,) * 90, seq_lens=tuple((53 * s * s) % 801 for s in range(90)), sliding_window=130
    ),
    "overflowing-logits": replace(
        _MANY, query_lens=(1,) * 90, seq_lens=tuple((41 * s * s) % 801 for s in range(90)), sharpness=60.0
    ),
}
_NUM_PAGES = 90 * 201

_SHARED = replace(_MANY, query_lens=(1,) * 7, seq_lens=(332, 301, 700, 0, 400, 332, 304), shared_prefix=True)
SAME_BEGINNING = {
    "more than a step": _SHARED,
    "ends with it": replace(_SHARED, seq_lens=(300, 301, 300, 303, 304, 300, 555)),
    "is all of it": replace(_SHARED, seq_lens=(300,) * 7),
    "ends earlier": replace(
        _SHARED, query_lens=(0, *_SHARED.query_lens[1:]), seq_lens=(100, 301, 700, 0, 400, 332, 304)
    ),
    "in one page": replace(_SHARED, seq_lens=(4, 5, 8, 0, 7, 4, 6)),
    "less than a page": replace(_SHARED, seq_lens=(3, 50, 8, 0, 7, 4, 6)),
    "one sequence": replace(_SHARED, seq_lens=(100, 0, 0, 0, 0, 0, 0)),
    "window over its end": replace(_SHARED, sliding_window=90),
    "window of some behind it": replace(_SHARED, sliding_window=20),
    "beside a chunk": replace(_SHARED, query_lens=(1, 1, 30, 0, 1, 1, 1)),
    "before chunks": replace(_SHARED, query_lens=(30, 1, 70, 0, 2, 66, 4)),
    "and in chunks": replace(
        _SHARED, query_lens=(332, 1, 401, 0, 399, 32, 5), seq_lens=(332, 301, 700, 0, 400, 332, 5)
    ),
    "before windowed chunks": replace(_SHARED, query_lens=(30, 1, 70, 0, 2, 66, 4), sliding_window=90),
    "overflowing logits": replace(_SHARED, sharpness=60.0, logit_soft_cap=50.0),
}
MAIN_BEGINNINGS = {"more than a step", "is all of it", "ends earlier", "window over its end", "before chunks"}
"""Those of the default run."""


@pytest.mark.parametrize(
    ("index", "implementation"),
    [
        (index, implementation)
        for index in range(len(SAMPLE))
        for implementation in CONTRACT
        if implementation != "reference" or index % 4 == 0  # plain enough
    ],
)
def test_pairwise_sample(index: int, implementation: str) -> None:
    assert_contract(SAMPLE[index], implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", CONTRACT)
def test_full_matrix(implementation: str) -> None:
    for case in full(SEED):
        assert_contract(case, implementation)


@pytest.mark.parametrize("implementation", SCALABLE)
@pytest.mark.parametrize("name", LONG_CHUNKS)
def test_chunks_of_many_tiles(name: str, implementation: str) -> None:
    assert_contract(LONG_CHUNKS[name], implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
@pytest.mark.parametrize("name", MANY_DECODES)
def test_decode_of_many_sequences(name: str, implementation: str) -> None:
    case = MANY_DECODES[name]
    assert_contract(replace(case, num_pages=_NUM_PAGES, max_query_len=1), implementation)


@pytest.mark.parametrize("implementation", SCALABLE)
@pytest.mark.parametrize(
    "name", [name if name in MAIN_BEGINNINGS else pytest.param(name, marks=pytest.mark.slow) for name in SAME_BEGINNING]
)
def test_sequences_that_begin_with_the_same_pages(name: str, implementation: str) -> None:
    assert_contract(SAME_BEGINNING[name], implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_one_token_of_one_sequence(implementation: str) -> None:
    assert_contract(Case(query_lens=(1,), seq_lens=(1,), page_size=1, num_heads=1, num_kv_heads=1), implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_inactive_rows_of_a_decode_step_give_zeros(implementation: str) -> None:
    """A decode step gives every row of the table one query; inactive rows have length 0 and lie anywhere."""
    case = Case(query_lens=(1,) * 6, seq_lens=(0, 5, 0, 0, 9, 0), max_query_len=1)
    assert_contract(case, implementation)
    assert_contract(replace(case, seq_lens=(7, 0, 0, 1, 0, 4), sliding_window=3), implementation)


@pytest.mark.parametrize("implementation", CONTRACT)
def test_window_of_everything_is_no_window(implementation: str) -> None:
    """The largest int32 is a legal window: no sum with it may wrap."""
    case = Case(query_lens=(1, 6), seq_lens=(11, 9), page_size=4)
    for window in (NO_WINDOW, NO_WINDOW - 1, 2**30, 11):
        assert_contract(replace(case, sliding_window=window), implementation)


@pytest.mark.parametrize("seed", range(3))
def test_sampler_covers_every_pair_of_profile_values(seed: int) -> None:
    rng = random.Random(seed)
    choices = pairwise({**GEOMETRY, **PROFILE}, 56, rng, pairwise(GEOMETRY, 8, rng))
    covered = set().union(*map(pairs_of, choices))
    values = {(name, value) for choice in choices for name, value in choice.items()}
    assert all_pairs(PROFILE) <= covered
    assert values == {(name, value) for name, options in {**GEOMETRY, **PROFILE}.items() for value in options}


def test_geometries_of_the_full_matrix_cover_every_pair() -> None:
    covered = set().union(*map(pairs_of, pairwise(GEOMETRY, 40, random.Random(SEED))))
    assert all_pairs(GEOMETRY) <= covered, f"repeat with PAGED_JAX_SEED={SEED}"
