"""One's own model (`own_model.py`), served by the engine and in a loop of one's own."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax import Engine, EngineConfig, Model, PagedCache, Request, append, append_decode, release
from tests.examples import numpy_model
from tests.examples.own_model import OwnModel, Params, contiguous_logits, init_params, layout

MODEL = OwnModel()
PARAMS = init_params(seed=0, vocab_size=32)
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30]]
NEW_TOKENS = 9


@partial(jax.jit, static_argnames="new_tokens")
def generate(params: Params, cache: PagedCache, prompts: Array, lens: Array, new_tokens: int) -> tuple[Array, ...]:
    """Greedy answers to prompts of several lengths, packed one behind the other, one a row of the cache."""
    cache, batch, ok = append(cache, lens, num_tokens=prompts.shape[0])
    hidden, kv = MODEL(params, prompts, batch, cache.kv)
    tokens = jnp.argmax(MODEL.logits(params, hidden[batch.logit_rows]), axis=-1).astype(jnp.int32)

    def step(carry: tuple[PagedCache, Array, Array], _: None) -> tuple[tuple[PagedCache, Array, Array], Array]:
        cache, tokens, ok = carry
        cache, batch, fits = append_decode(cache, jnp.ones(tokens.shape, bool))
        hidden, kv = MODEL(params, tokens, batch, cache.kv)
        following = jnp.argmax(MODEL.logits(params, hidden), axis=-1).astype(jnp.int32)
        return (replace(cache, kv=kv), following, ok & fits), tokens

    (cache, last, ok), answers = lax.scan(step, (replace(cache, kv=kv), tokens, ok), length=new_tokens - 1)
    return release(cache, jnp.ones(lens.shape, bool)), jnp.concatenate([answers, last[None]]).T, ok


def expected() -> list[list[int]]:
    """Greedy answers without a cache; their two best tokens must lie further apart than rounding."""
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            log_probs = numpy_model.log_probs(PARAMS, tokens)[-1]
            second, best = np.sort(log_probs)[-2:]
            assert best - second > 2 * numpy_model.log_prob_bound(PARAMS)
            tokens.append(int(log_probs.argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def test_in_a_loop_of_ones_own() -> None:
    cache = PagedCache.create(layout(num_pages=32), max_seqs=len(PROMPTS), pages_per_seq=8)
    lens = jnp.array([len(prompt) for prompt in PROMPTS], jnp.int32)
    packed = jnp.array([token for prompt in PROMPTS for token in prompt], jnp.int32)
    cache, answers, ok = generate(PARAMS, cache, packed, lens, NEW_TOKENS)
    assert ok
    assert answers.tolist() == expected()
    assert int(cache.pool.num_free) == 31


def test_in_the_engine() -> None:
    assert isinstance(MODEL, Model)
    config = EngineConfig(max_seqs=len(PROMPTS), max_model_len=32, max_tokens_per_step=16)
    engine = Engine(MODEL, PARAMS, layout(num_pages=16), config=config)
    answers = engine.generate([Request(prompt, max_tokens=NEW_TOKENS) for prompt in PROMPTS])
    assert [answer.token_ids for answer in answers] == expected()


def test_the_network_over_contiguous_keys_is_the_same() -> None:
    token_ids = PROMPTS[1]
    got = jax.nn.log_softmax(jax.jit(contiguous_logits)(PARAMS, jnp.array(token_ids, jnp.int32)))
    atol = numpy_model.log_prob_bound(PARAMS)
    np.testing.assert_allclose(got, numpy_model.log_probs(PARAMS, token_ids), rtol=0, atol=atol)
