"""The sampler against NumPy: which tokens are kept, with what probability, and that only the key decides."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from paged_jax import sampling

VOCAB, WIDE = 12, 300
ROWS = 4000


def numpy_kept(logits, params):
    """Float64 log probabilities after temperature, top-k, top-p and min-p, one after another; -inf for dropped."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    keep = np.ones(len(scaled), bool)
    keep[order[len(scaled) if params.top_k is None else params.top_k :]] = False
    probs = np.where(keep, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    reached = 0.0
    for token in order:
        if params.top_p < 1 and reached >= params.top_p:
            keep[token] = False
        reached += probs[token]
    probs = np.where(keep, probs, 0)
    keep &= probs >= params.min_p * probs.max()
    kept = np.where(keep, scaled, -np.inf)
    return kept - np.log(np.exp(kept - kept.max()).sum()) - kept.max()


@cache
def compiled():
    return jax.jit(sampling.sample)


def draw(logits, rows, positions):
    packed = sampling.pack([(params, child, 0) for params, child in rows], len(rows))
    return np.asarray(compiled()(jnp.asarray(logits, jnp.float32), packed, jnp.asarray(positions, jnp.int32)))


def logits(vocab, spread=2.0, seed=3):
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * spread


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.15},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.999},
]


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_distribution(fields):
    """Pearson's statistic of 4,000 draws; seeds are fixed, so that the test gives the same answer every time. At a
    significance of 1e-4 a correct sampler would fail one in 10,000 choices of seeds."""
    params = [pj.SamplingParams(**fields, seed=seed) for seed in range(ROWS)]
    one = logits(VOCAB)
    tokens = draw(np.tile(one, (ROWS, 1)), [(p, 0) for p in params], np.zeros(ROWS))
    probs = np.exp(numpy_kept(one, params[0]))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[probs == 0].any()
    rare = (probs > 0) & (probs * ROWS < 5)  # pooled, as the statistic asks for
    expected = np.append(probs[(probs > 0) & ~rare], probs[rare].sum()) * ROWS
    found = np.append(counts[(probs > 0) & ~rare], counts[rare].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    statistic = ((found - expected) ** 2 / expected).sum()
    # Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal.
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3 if degrees else 1e-9
    assert statistic <= limit


@cache
def wide_case():
    """Rows of 300 tokens whose cuts lie within the 64 most likely ones, past them, and nowhere."""
    fields = [
        {"top_k": 5},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 200, "top_p": 0.9},
        {"top_k": 299},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"top_p": 0.95, "min_p": 0.01},
        {"min_p": 0.02},
        {},
        {"top_k": 1000, "top_p": 0.7},
    ]
    rng = np.random.default_rng(1)
    rows = []
    for seed in range(8):
        for spread in (0.3, 3.0):
            rows += [(pj.SamplingParams(1.2, **f, seed=seed), seed % 3, rng.normal(size=WIDE) * spread) for f in fields]
    params, children, row_logits = zip(*rows, strict=True)
    return params, children, np.array(row_logits, np.float32), np.arange(len(rows)) * 7


def test_a_row_is_jax_categorical_on_what_is_kept():
    params, children, row_logits, positions = wide_case()
    tokens = draw(row_logits, list(zip(params, children, strict=True)), positions)

    @jax.jit
    def categorical(seed, child, position, kept):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), child), position)
        return jax.random.categorical(key, kept)

    for row, token in enumerate(tokens):
        kept = numpy_kept(row_logits[row], params[row]).astype(np.float32)
        assert token == categorical(params[row].seed, children[row], positions[row], kept)


@pytest.mark.parametrize("order", ["reversed", "alone"])
def test_only_the_key_decides(order):
    """A row's draw does not depend on its neighbours, even when one of them makes the step sort the vocabulary."""
    params, children, row_logits, positions = wide_case()
    rows = list(zip(params, children, strict=True))
    tokens = draw(row_logits, rows, positions)
    if order == "reversed":
        np.testing.assert_array_equal(draw(row_logits[::-1], rows[::-1], positions[::-1])[::-1], tokens)
        return
    greedy = [(pj.SamplingParams(), 0)] * (len(rows) - 1)
    for row in range(0, 22, 3):
        alone = draw(np.roll(row_logits, -row, axis=0), [rows[row], *greedy], np.roll(positions, -row))
        assert alone[0] == tokens[row]
        np.testing.assert_array_equal(alone[1:], np.roll(row_logits, -row, axis=0)[1:].argmax(-1))


def test_seed_child_and_position_each_change_the_draws():
    one = np.zeros((64, WIDE), np.float32)
    rows = [(pj.SamplingParams(1.0, seed=2**32 - 1), 0)] * 64
    base = draw(one, rows, np.arange(64))
    assert len(set(base.tolist())) > 40  # 64 draws of 300
    assert (draw(one, [(pj.SamplingParams(1.0, seed=2**31 - 1), 0)] * 64, np.arange(64)) != base).sum() > 50
    assert (draw(one, [(rows[0][0], 1)] * 64, np.arange(64)) != base).sum() > 50
    assert (draw(one, rows, np.arange(64) + 64) != base).sum() > 50


def test_equal_logits_are_ranked_by_id():
    rows = [(pj.SamplingParams(1.0, top_k=2, seed=seed), 0) for seed in range(64)]
    assert set(draw(np.zeros((64, WIDE)), rows, np.zeros(64)).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-38, 3e38])
def test_extreme_temperatures_and_forbidden_tokens(temperature):
    row_logits = np.tile(logits(WIDE) * 10, (64, 1))
    row_logits[:, 5:] = -np.inf
    rows = [(pj.SamplingParams(temperature, top_k=top_k, seed=seed), 0) for seed in range(32) for top_k in (None, 9)]
    tokens = set(draw(row_logits, rows, np.zeros(64)).tolist())
    assert tokens == ({int(row_logits[0].argmax())} if temperature < 1 else set(range(5)))


def test_logprobs():
    one = logits(VOCAB) * np.ones((2, 1), np.float32)
    tokens = jnp.array([3, 7], jnp.int32)
    expected = np.float64(one) - np.log(np.exp(np.float64(one)).sum(-1, keepdims=True))
    found = jax.jit(sampling.logprobs)(jnp.asarray(one), tokens, jnp.array([0, 2], jnp.int32))
    np.testing.assert_allclose(found.chosen, expected[[0, 1], [3, 7]], rtol=1e-5)
    np.testing.assert_allclose(found.top[1], np.sort(expected[1])[::-1], rtol=1e-5)
    np.testing.assert_array_equal(found.top_ids[1], np.argsort(-expected[1], kind="stable"))


def test_penalty_is_applied_once_for_each_token_seen():
    row_logits = np.array([[2.0, -2.0, 3.0, -np.inf, 5.0]] * 2, np.float32)
    context = np.array([[0, 1, 1, 3, 0, -1, -1], [-1] * 7], np.int32)
    found = sampling.penalise(jnp.asarray(row_logits), jnp.asarray(context), jnp.array([2.0, 2.0], jnp.float32))
    np.testing.assert_array_equal(found, [[1.0, -4.0, 3.0, -np.inf, 5.0], row_logits[1]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, or None for all tokens, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 and finite, got 0.0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        pj.SamplingParams(**fields)
