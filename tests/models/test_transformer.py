"""The decoder over paged keys and values, against an uncached float64 forward in NumPy."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models.config import Llama3RopeScaling, TransformerConfig
from models.transformer import functional, random_params
from paged_jax.steps import temporary_bytes
from tests.models import numpy_llama

CONFIG = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=256,
    tie_word_embeddings=True,
)
VARIANTS = {
    "tied": CONFIG,
    "untied": replace(CONFIG, tie_word_embeddings=False),
    "mha": replace(CONFIG, num_kv_heads=6),
    "mqa": replace(CONFIG, num_kv_heads=1),
    "llama3 rope": replace(CONFIG, rope_theta=500.0, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64)),
}
LENGTHS = (70, 1, 33, 17)
append = jax.jit(pj.append, static_argnames="num_tokens")
TOLERANCE = 2e-5
"""Relative to the largest logit: about 200 float32 roundings of 2**-24 in a row (3 layers, reductions of 48 at most)
come to 1.2e-5."""


@cache
def params_of(name):
    return random_params(VARIANTS[name], seed=3)


def random_ids(rng):
    return [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]


def poisoned_cache(layout, rng, *, max_seqs, pages_per_seq):
    """An empty cache whose pages are NaN and whose free pages come in random order."""
    empty = pj.PagedCache.create(layout, max_seqs=max_seqs, pages_per_seq=pages_per_seq)
    free = np.asarray(empty.pool.free_stack).copy()
    rng.shuffle(free[: layout.num_pages - 1])
    return replace(
        empty,
        kv=replace(empty.kv, pages=jnp.full(layout.pages_shape, jnp.nan, layout.dtype)),
        pool=empty.pool._replace(free_stack=jnp.asarray(free)),
    )


def run_in_chunks(model, params, layout, sequences, rng, *, num_tokens, chunk):
    """Logits of every token of every sequence, computed in ragged steps of up to `chunk` tokens a sequence."""

    @jax.jit
    def step(params, token_ids, batch, kv):
        hidden, kv = model(params, token_ids, batch, kv)
        return model.logits(params, hidden), kv

    pages_per_seq = layout.pages_for(max(LENGTHS)) + 1
    cache = poisoned_cache(layout, rng, max_seqs=len(sequences), pages_per_seq=pages_per_seq)
    done = [0] * len(sequences)
    logits = [[] for _ in sequences]
    while any(done[s] < len(ids) for s, ids in enumerate(sequences)):
        budget, counts = num_tokens, []
        for s, ids in enumerate(sequences):
            counts.append(min(len(ids) - done[s], int(rng.integers(0, chunk + 1)), budget))
            budget -= counts[-1]
        cache, batch, ok = append(cache, jnp.asarray(counts, jnp.int32), num_tokens=num_tokens)
        assert ok
        packed = np.concatenate([ids[done[s] : done[s] + counts[s]] for s, ids in enumerate(sequences)])
        token_ids = np.zeros(num_tokens, np.int32)
        token_ids[: len(packed)] = packed
        step_logits, kv = step(params, jnp.asarray(token_ids), batch, cache.kv)
        cache = replace(cache, kv=kv)
        for s, count in enumerate(counts):
            start = int(batch.cu_query_lens[s])
            logits[s] += list(np.asarray(step_logits[start : start + count]))
            done[s] += count
    return [np.stack(rows) for rows in logits]


def assert_close(got, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize(
    ("page_size", "chunk"), [(1, 7), (4, 40), (16, 30), (64, 7), pytest.param(16, 1, marks=pytest.mark.slow)]
)
def test_any_chunking_equals_one_uncached_forward(page_size, chunk):
    rng = np.random.default_rng([page_size, chunk])
    model = functional(CONFIG)
    num_pages = sum(-(-length // page_size) for length in LENGTHS) + 4
    layout = model.kv_layout(num_pages=num_pages, page_size=page_size)
    sequences = random_ids(rng)
    got = run_in_chunks(model, params_of("tied"), layout, sequences, rng, num_tokens=48, chunk=chunk)
    for ids, logits in zip(sequences, got, strict=True):
        assert_close(logits, numpy_llama.forward(CONFIG, params_of("tied"), ids))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_numpy_model(name):
    rng = np.random.default_rng(1)
    unroll_layers = name in ("untied", "llama3 rope")
    model = functional(VARIANTS[name], unroll_layers=unroll_layers)
    layout = model.kv_layout(num_pages=20, page_size=16)
    sequences = random_ids(rng)
    got = run_in_chunks(model, params_of(name), layout, sequences, rng, num_tokens=128, chunk=128)
    for ids, logits in zip(sequences, got, strict=True):
        assert_close(logits, numpy_llama.forward(VARIANTS[name], params_of(name), ids))


def test_llama3_scaling_changes_the_result():
    """The tolerance would not hide a forgotten rope scaling."""
    config = VARIANTS["llama3 rope"]
    ids = random_ids(np.random.default_rng(1))[0]
    scaled = numpy_llama.forward(config, params_of("llama3 rope"), ids)
    plain = numpy_llama.forward(replace(config, rope_scaling=None), params_of("llama3 rope"), ids)
    assert np.abs(scaled - plain).max() > 100 * TOLERANCE * np.abs(scaled).max()


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_bfloat16_is_float32_with_rounded_numbers(num_tokens):
    """Also with fewer rows than the eight that products are padded to."""
    rng = np.random.default_rng(2)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of("tied"))
    model = functional(CONFIG)
    layout = model.kv_layout(num_pages=20, page_size=16, dtype=jnp.bfloat16)
    sequences = [rng.integers(0, CONFIG.vocab_size, 9).tolist()]
    (got,) = run_in_chunks(model, rounded, layout, sequences, rng, num_tokens=num_tokens, chunk=num_tokens)
    assert got.dtype == np.float32
    expected = numpy_llama.forward(CONFIG, rounded, sequences[0])
    # Some 30 roundings of 2**-9 of the residual stream add up as a random walk: sqrt(30) * 2**-9 = 1.1 %; 4 deviations.
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.045 * np.abs(expected).max())


def test_functional_model_is_hashable_and_holds_no_arrays():
    model = functional(CONFIG)
    assert hash(model) == hash(functional(CONFIG))
    assert not jax.tree.leaves(model.graphdef)


def test_parameters_are_plain_arrays_in_a_list_of_layers():
    params = params_of("tied")
    assert isinstance(params["layers"], list)
    assert len(params["layers"]) == CONFIG.num_layers
    assert all(type(leaf) is type(jnp.zeros(1)) for leaf in jax.tree.leaves(params))
    assert "head" not in params
    assert "head" in params_of("untied")


@pytest.mark.slow
@pytest.mark.parametrize("unroll_layers", [True, False])
def test_temporary_memory_does_not_grow_with_the_pool(unroll_layers):
    model = functional(CONFIG, unroll_layers=unroll_layers)
    config = pj.EngineConfig(max_seqs=2, max_model_len=64, max_tokens_per_step=16)
    used = [
        temporary_bytes(model, params_of("tied"), model.kv_layout(num_pages=num_pages), config)
        for num_pages in (20, 2000)
    ]
    assert used[0] == used[1]
