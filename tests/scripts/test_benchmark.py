"""The benchmark's contiguous cache is a fair rival only if it computes the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import functional
from paged_jax import batch as batches
from scripts.benchmark import contiguous_attention
from tests.models.test_architectures import LOGITS, PREFILLS, TOLERANCE, checkpoint, token_ids


def test_contiguous_attention_gives_gemma2s_logits():
    """Scale, windows and soft caps are all in it."""
    config, params = checkpoint("gemma2")
    model = functional(config, attention=contiguous_attention, unroll_layers=True)
    length = len(token_ids()[1])
    shape = (2, config.num_kv_heads, length, config.head_dim)
    kv = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))

    @jax.jit
    def step(params, ids, position, kv):
        ones = jnp.ones(2, jnp.int32)
        batch = batches.decode(jnp.zeros((2, 1), jnp.int32), ones * position, ones, page_size=length)
        hidden, kv = model(params, ids, batch, kv)
        return model.logits(params, hidden), kv

    run, rows = partial(step, params), []
    for position, ids in enumerate(zip(*(sequence[:length] for sequence in token_ids()), strict=True)):
        logits, kv = run(np.array(ids, np.int32), np.int32(position), kv)
        rows.append(np.asarray(logits))
    expected = LOGITS["gemma2"]
    first, second = np.stack(rows, axis=1)
    atol = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(first, expected[:length], rtol=0, atol=atol)
    np.testing.assert_allclose(second, expected[PREFILLS[0] + 20 :], rtol=0, atol=atol)
