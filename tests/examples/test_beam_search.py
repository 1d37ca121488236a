"""Beam search inside one jit: beams fork by `reorder`, and share the pages of all that they have in common."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax import NULL_PAGE, PagedCache, append, append_decode, release, reorder, usage
from tests.examples import numpy_model
from tests.examples.own_model import OwnModel, Params, init_params, layout

MODEL = OwnModel()
EOS, PAD = 0, -1


class Beams(NamedTuple):
    """The hypotheses, best first; row i of the cache holds the tokens of hypothesis i but its last."""

    cache: PagedCache
    tokens: Array  # [num_beams, max_new_tokens], PAD behind the end
    scores: Array  # [num_beams] log-probabilities
    num_tokens: Array
    ok: Array  # whether the pages sufficed
    peak_pages: Array
    peak_entries: Array  # of the block tables: pages that would be in use if none were shared


@partial(jax.jit, static_argnames="max_new_tokens")
def beam_search(params: Params, cache: PagedCache, prompt: Array, max_new_tokens: int) -> Beams:
    """The most probable continuations of a prompt, as many as the (empty) cache has rows."""
    num_beams = cache.tables.seq_lens.shape[0]
    row = jnp.arange(num_beams, dtype=jnp.int32)

    cache, batch, ok = append(cache, jnp.where(row == 0, prompt.shape[0], 0), num_tokens=prompt.shape[0])
    hidden, kv = MODEL(params, prompt, batch, cache.kv)
    scores, first = lax.top_k(jax.nn.log_softmax(MODEL.logits(params, hidden[-1:])[0]), num_beams)
    cache = reorder(replace(cache, kv=kv), jnp.zeros(num_beams, jnp.int32))  # all rows become the prompt
    tokens = jnp.full((num_beams, max_new_tokens), PAD, jnp.int32).at[:, 0].set(first)

    def num_entries(cache: PagedCache) -> Array:
        return (cache.tables.page_ids != NULL_PAGE).sum(dtype=jnp.int32)

    def newest(beams: Beams) -> Array:
        return beams.tokens[:, beams.num_tokens - 1]

    def is_active(beams: Beams) -> Array:
        return (newest(beams) != EOS) & (newest(beams) != PAD)

    def unfinished(beams: Beams) -> Array:
        return (beams.num_tokens < max_new_tokens) & is_active(beams).any()

    def step(beams: Beams) -> Beams:
        active = is_active(beams)
        cache = release(beams.cache, ~active)  # a hypothesis that has ended needs no keys any more
        cache, batch, ok = append_decode(cache, active)  # beams that wrote to a shared page get copies of it
        hidden, kv = MODEL(params, newest(beams), batch, cache.kv)
        log_probs = jax.nn.log_softmax(MODEL.logits(params, hidden))

        # One that has ended has one continuation, itself.
        stay = jnp.where(jnp.arange(log_probs.shape[1]) == 0, 0.0, -jnp.inf)
        candidates = beams.scores[:, None] + jnp.where(active[:, None], log_probs, stay)
        scores, index = lax.top_k(candidates.reshape(-1), num_beams)
        parents, token = index // log_probs.shape[1], index % log_probs.shape[1]
        tokens = beams.tokens[parents].at[:, beams.num_tokens].set(jnp.where(active[parents], token, PAD))
        peak_pages = jnp.maximum(beams.peak_pages, usage(cache)["live"])
        peak_entries = jnp.maximum(beams.peak_entries, num_entries(cache))
        cache = reorder(replace(cache, kv=kv), parents)
        return Beams(cache, tokens, scores, beams.num_tokens + 1, beams.ok & ok, peak_pages, peak_entries)

    beams = Beams(cache, tokens, scores, jnp.int32(1), ok, usage(cache)["live"], num_entries(cache))
    beams = lax.while_loop(unfinished, step, beams)
    return beams._replace(cache=release(beams.cache, jnp.ones(num_beams, bool)))


def uncached(
    params: Params, prompt: Sequence[int], num_beams: int, max_new_tokens: int
) -> list[tuple[float, list[int]]]:
    """The same in NumPy, computing every hypothesis from its first token on. The scores of those kept, and the best
    of those dropped, must lie further apart than rounding."""
    apart = 2 * max_new_tokens * numpy_model.log_prob_bound(params)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    while any(tokens[-1:] != [EOS] for _, tokens in beams) and max(len(t) for _, t in beams) < max_new_tokens:
        candidates = []
        for score, tokens in beams:
            if tokens[-1:] == [EOS]:
                candidates.append((score, tokens))
                continue
            log_probs = numpy_model.log_probs(params, [*prompt, *tokens])[-1]
            candidates += [(score + float(p), [*tokens, token]) for token, p in enumerate(log_probs)]
        candidates.sort(key=lambda candidate: -candidate[0])
        assert np.diff([-score for score, _ in candidates[: num_beams + 1]]).min() > apart
        beams = candidates[:num_beams]
    return beams


def test_beam_search() -> None:
    params = init_params(seed=34, vocab_size=16)
    num_beams, max_new_tokens, pages_per_seq = 4, 14, 6
    prompt = [3, 1, 4, 1, 5, 9, 2]
    cache = PagedCache.create(
        layout(num_pages=1 + num_beams * pages_per_seq), max_seqs=num_beams, pages_per_seq=pages_per_seq
    )
    beams = jax.device_get(beam_search(params, cache, jnp.array(prompt, jnp.int32), max_new_tokens))
    expected = uncached(params, prompt, num_beams, max_new_tokens)

    assert beams.ok
    tokens = [[token for token in row if token != PAD] for row in beams.tokens.tolist()]
    assert tokens == [tokens for _, tokens in expected]
    atol = max_new_tokens * numpy_model.log_prob_bound(params)
    np.testing.assert_allclose(beams.scores, [score for score, _ in expected], rtol=0, atol=atol)

    ended = [row for row in tokens if row[-1] == EOS]
    assert 0 < len(ended) < num_beams, "the example shows both an end and none"
    assert beams.peak_pages == 7
    assert beams.peak_entries > 7
    assert beams.cache.pool.num_free == cache.layout.num_pages - 1
    print(f"{beams.peak_pages} pages at most; {beams.peak_entries} would be needed if each beam had its own")
