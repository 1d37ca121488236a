"""Long contexts: SmolLM2 near the end of its own, and 32,768 tokens of a tiny model."""

import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models import registry
from models.config import TransformerConfig
from models.transformer import functional, random_params
from paged_jax import batch as batches

DATA = Path(__file__).parent / "data"
LOGITS_ATOL = 1e-3
"""As for the shorter texts (see test_smollm2.py): what differs is the order of the sums."""
PAGE_SIZE, CHUNK, LONGEST = 16, 512, 32768
TINY = TransformerConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_model_len=LONGEST,
)


@partial(jax.jit, static_argnames="num_tokens")
def chunk_batch(table, cached, num_tokens):
    """The next `num_tokens` of one sequence."""
    return batches.ragged(
        table,
        cached[None],
        jnp.full(1, num_tokens, jnp.int32),
        page_size=PAGE_SIZE,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
    )


def table_of(num_tokens):
    """One sequence's pages in random order."""
    return np.random.default_rng(0).permutation(np.arange(1, -(-num_tokens // PAGE_SIZE) + 1, dtype=np.int32))[None]


def poisoned(layout):
    return pj.KVPages(jnp.full(layout.pages_shape, jnp.nan, layout.dtype), layout)


@pytest.mark.slow
def test_smollm2_at_8000_tokens():
    """tests/data/record_long.py made the record."""
    record = np.load(DATA / "smollm2_long.npz")
    token_ids = record["token_ids"].astype(np.int32)
    checkpoint = registry.load("smollm2-135m")
    model = functional(checkpoint.config)
    layout = model.kv_layout(num_pages=len(token_ids) // PAGE_SIZE + 1, page_size=PAGE_SIZE)
    kv, table = poisoned(layout), table_of(len(token_ids))

    @partial(jax.jit, donate_argnums=3)
    def step(params, ids, batch, kv):
        hidden, kv = model(params, ids, batch, kv)
        return model.logits(params, hidden), kv

    best, rows, chunk = [], [], 500
    for start in range(0, len(token_ids), chunk):
        batch = chunk_batch(table, np.int32(start), chunk)
        logits, kv = step(checkpoint.params, token_ids[start : start + chunk], batch, kv)
        best.append(np.asarray(jnp.argmax(logits, axis=-1)))
        here = (record["positions"] >= start) & (record["positions"] < start + chunk)
        logits = np.asarray(logits)[record["positions"][here] - start]
        rows.append(np.take_along_axis(logits, record["ids"][here].astype(int), axis=1))
    np.testing.assert_allclose(np.concatenate(rows), record["logits"], rtol=0, atol=LOGITS_ATOL)
    clear = record["gaps"] > 2 * LOGITS_ATOL
    print(f"{np.count_nonzero(~clear)} of {len(clear)} positions are near ties")
    assert np.count_nonzero(~clear) < len(clear) / 500
    np.testing.assert_array_equal(np.concatenate(best)[clear], record["best"][clear])


def tiny_step():
    model = functional(TINY)

    def step(params, ids, batch, kv):
        hidden, kv = model(params, ids, batch, kv)
        return model.logits(params, hidden[batch.logit_rows]), kv

    return model, jax.jit(step, donate_argnums=3)


def test_prefill_takes_memory_that_does_not_grow_with_the_context():
    model, step = tiny_step()
    layout = model.kv_layout(num_pages=LONGEST // PAGE_SIZE + 1, page_size=PAGE_SIZE)
    params, kv = jax.eval_shape(lambda: (random_params(TINY), pj.KVPages.create(layout)))
    used = []
    for context in (LONGEST // 8, LONGEST):
        batch = chunk_batch(table_of(context), np.int32(0), CHUNK)
        program = step.lower(params, np.zeros(CHUNK, np.int32), batch, kv).compile()
        used.append(program.memory_analysis().temp_size_in_bytes)
    assert used[0] == used[1]
    assert used[1] < 8 * CHUNK * LONGEST  # two float32 logits for each query and key would be this


@pytest.mark.slow
def test_prefill_of_32k_tokens_and_the_time_of_a_decode_step():
    """With one layer, the last logits need every key but only one query: that is what NumPy computes in float64."""
    model, step = tiny_step()
    params = random_params(TINY)
    layout = model.kv_layout(num_pages=LONGEST // PAGE_SIZE + 1, page_size=PAGE_SIZE)
    kv, table = poisoned(layout), table_of(LONGEST)
    token_ids = np.random.default_rng(1).integers(0, TINY.vocab_size, LONGEST).astype(np.int32)
    for start in range(0, LONGEST, CHUNK):
        ids = token_ids[start : start + CHUNK]
        logits, kv = step(params, ids, chunk_batch(table, np.int32(start), CHUNK), kv)
    expected = last_logits(params, token_ids)
    # The softmax's sums over 32,768 keys in pieces of 256, and 100 other roundings of 2**-24.
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())

    contexts, best = (8192, 16384, 32768), {}
    for _ in range(30):  # in turns, so that all see the same neighbours
        for context in contexts:
            batch = chunk_batch(table, np.int32(context - 1), 1)
            started = time.perf_counter()
            logits, kv = jax.block_until_ready(step(params, token_ids[context - 1 : context], batch, kv))
            best[context] = min(best.get(context, np.inf), time.perf_counter() - started)
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    growth = [best[contexts[1]] - best[contexts[0]], best[contexts[2]] - best[contexts[1]]]
    assert 1.4 < growth[1] / growth[0] < 2.8, best  # twice as many more keys


def last_logits(params, token_ids):
    """The Llama decoder of one layer at the last position, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    (layer,), eps = params["layers"], TINY.rms_norm_eps

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def turned(x):
        half = TINY.head_dim // 2
        angles = np.outer(np.arange(len(x)), TINY.rope_theta ** (-np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    x = params["embed"][token_ids]
    q, k, v = ((norm(x, layer["attn_norm"]) @ layer[name].T).reshape(len(x), -1, TINY.head_dim) for name in "qkv")
    q, k = turned(q)[-1], turned(k)
    heads = []
    for head in range(TINY.num_heads):
        logits = k[:, head // 2] @ q[head] / np.sqrt(TINY.head_dim)
        weights = np.exp(logits - logits.max())
        heads.append(weights / weights.sum() @ v[:, head // 2])
    x = x[-1] + layer["o"] @ np.concatenate(heads)
    normed = norm(x, layer["mlp_norm"])
    gate = layer["gate"] @ normed
    x = x + layer["down"] @ (gate / (1 + np.exp(-gate)) * (layer["up"] @ normed))
    return params["head"] @ norm(x, params["final_norm"])
