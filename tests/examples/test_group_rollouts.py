"""Group rollouts and a REINFORCE step: groups of answers fork their prompt's pages, the model learns from the best.

Rollouts read pages, which have no derivative. Training runs the same `forward` over contiguous keys and values.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array, lax

from paged_jax import PagedCache, append, append_decode, release, reorder, usage
from tests.examples import numpy_model
from tests.examples.own_model import OwnModel, Params, contiguous_logits, init_params, layout

MODEL = OwnModel()
VOCAB_SIZE = 8
NUM_PROMPTS, GROUP_SIZE, PROMPT_LEN, ANSWER_LEN = 4, 8, 9, 6
OPTIMIZER = optax.adam(5e-4)


@jax.jit
def rollouts(params: Params, cache: PagedCache, prompts: Array, key: Array) -> tuple[Array, ...]:
    """Samples GROUP_SIZE answers to each of prompts [NUM_PROMPTS, PROMPT_LEN] with an (empty) cache.

    Returns answers and their log-probabilities [NUM_PROMPTS * GROUP_SIZE, ANSWER_LEN], the cache, empty again, the
    pages that the answers held in the end, and whether the pages sufficed.
    """
    row = jnp.arange(NUM_PROMPTS * GROUP_SIZE, dtype=jnp.int32)
    leader = row - row % GROUP_SIZE  # each group's first row reads the prompt, the others become its forks
    cache, batch, ok = append(cache, jnp.where(row == leader, PROMPT_LEN, 0), num_tokens=prompts.size)
    hidden, kv = MODEL(params, prompts.reshape(-1), batch, cache.kv)
    cache = reorder(replace(cache, kv=kv), leader)
    logits = MODEL.logits(params, hidden[batch.logit_rows])[leader]

    def sample(logits: Array, key: Array) -> tuple[Array, Array]:
        tokens = jax.random.categorical(key, logits).astype(jnp.int32)
        return tokens, jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]

    def step(carry: tuple[PagedCache, Array, Array], key: Array) -> tuple[tuple[PagedCache, Array, Array], tuple]:
        cache, tokens, ok = carry
        cache, batch, fits = append_decode(cache, jnp.ones(row.shape, bool))
        hidden, kv = MODEL(params, tokens, batch, cache.kv)
        tokens, log_probs = sample(MODEL.logits(params, hidden), key)
        return (replace(cache, kv=kv), tokens, ok & fits), (tokens, log_probs)

    first, *others = jax.random.split(key, ANSWER_LEN)
    first_sample = sample(logits, first)
    (cache, _, ok), samples = lax.scan(step, (cache, first_sample[0], ok), jnp.stack(others))
    answers, log_probs = (jnp.concatenate([one[None], more]).T for one, more in zip(first_sample, samples, strict=True))
    return answers, log_probs, release(cache, jnp.ones(row.shape, bool)), usage(cache)["live"], ok


def training_log_probs(params: Params, prompts: Array, answers: Array) -> Array:
    """Log-probabilities [rows, ANSWER_LEN] of answers, by the uncached model that can be differentiated."""
    token_ids = jnp.concatenate([jnp.repeat(prompts, GROUP_SIZE, axis=0), answers], axis=1)
    logits = jax.vmap(partial(contiguous_logits, params))(token_ids[:, :-1])[:, PROMPT_LEN - 1 :]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)[..., 0]


def rewards_of(answers: Array) -> Array:
    """Toy task: the share of an answer's tokens that are even."""
    return jnp.mean(answers % 2 == 0, axis=1)


@jax.jit
def train(
    params: Params, state: optax.OptState, prompts: Array, answers: Array
) -> tuple[Params, optax.OptState, Array]:
    """One REINFORCE step (Williams 1992) whose baseline and scale are the group's (Shao et al. 2024, section 4.1)."""
    rewards = rewards_of(answers).reshape(NUM_PROMPTS, GROUP_SIZE)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = (centred / (rewards.std(axis=1, keepdims=True) + 1e-2)).reshape(-1, 1)

    def loss(params: Params) -> tuple[Array, Array]:
        log_probs = training_log_probs(params, prompts, answers)
        return -jnp.mean(advantages * log_probs), log_probs

    grads, log_probs = jax.grad(loss, has_aux=True)(params)
    with jax.numpy_dtype_promotion("standard"):  # for optax, which mixes int32 and float32
        updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, log_probs


@pytest.mark.slow
def test_group_rollouts() -> None:
    pages = layout(num_pages=128)
    cache = PagedCache.create(pages, max_seqs=NUM_PROMPTS * GROUP_SIZE, pages_per_seq=4)
    params = init_params(seed=0, vocab_size=VOCAB_SIZE)
    state = OPTIMIZER.init(params)
    draw = jax.jit(lambda key: jax.random.randint(key, (NUM_PROMPTS, PROMPT_LEN), 0, VOCAB_SIZE, jnp.int32))
    rewards, peak = [], 0
    for key in jax.random.split(jax.random.key(0), 40):
        prompts = draw(key)
        answers, log_probs, cache, live, ok = jax.block_until_ready(rollouts(params, cache, prompts, key))
        assert ok
        bound = 2 * numpy_model.log_prob_bound(params)  # one for the rollout's rounding, one for the training's
        params, state, again = train(params, state, prompts, answers)
        np.testing.assert_allclose(log_probs, again, rtol=0, atol=bound)
        rewards.append(np.mean(np.asarray(answers) % 2 == 0))
        peak = max(peak, int(live))

    before, after = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert before < 0.7
    assert after > 0.9
    shared, whole = PROMPT_LEN // pages.page_size, pages.pages_for(PROMPT_LEN + ANSWER_LEN - 1)
    alone = NUM_PROMPTS * GROUP_SIZE * whole
    assert peak == NUM_PROMPTS * (shared + GROUP_SIZE * (whole - shared)) < alone
    assert int(cache.pool.num_free) == pages.num_pages - 1
    print(f"reward {before:.2f} -> {after:.2f}; {peak} pages; {alone} would be needed if each answer had its own")
