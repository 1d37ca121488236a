"""Sampled answers, log probabilities, stops and several samples, from the engine with the tiny model."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from paged_jax import sampling, steps
from tests.paged_jax.test_engine import assert_all_free, assert_greedy, make_engine, prompts, requests
from tests.paged_jax.tiny import VOCAB, Letters, TinyModel, greedy, numpy_logits, tiny_layout, tiny_params

NEW = 9
ATOL = 1e-4
"""Log probabilities are differences of logits near 30, whose float32 error is about 1e-5."""
KINDS = [
    {"temperature": 8.0},
    {"temperature": 8.0, "top_k": 5},
    {"temperature": 10.0, "top_p": 0.8},
    {"temperature": 9.0, "min_p": 0.05, "seed": 2**32 - 1},
    {"temperature": 12.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {},
]


@cache
def engine():
    """Shared by all tests that leave it as they found it."""
    return make_engine(tokenizer=Letters())


def sampled(**changes):
    """One request for each prompt, each sampled in another way; the last is greedy."""
    return [
        pj.Request(prompt, max_tokens=NEW, sampling=pj.SamplingParams(**{"seed": i} | kind), **changes)
        for i, (prompt, kind) in enumerate(zip(prompts(), KINDS, strict=True))
    ]


@cache
def answers():
    return engine().generate(sampled(ignore_eos=True))


def tokens(completions):
    return [completion.token_ids for completion in completions]


def numpy_logprobs(token_ids):
    """Float64 log probability of each token but the first, and of all of the vocabulary at its place."""
    rows = np.array([numpy_logits(np.array(token_ids[:end])) for end in range(1, len(token_ids))])
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return rows[np.arange(len(rows)), token_ids[1:]], rows


@pytest.mark.slow
def test_warm_up_compiles_what_requests_like_these_need():
    scored = pj.Request([1, 2], max_tokens=3, sampling=pj.SamplingParams(1.0), prompt_logprobs=True)
    engine().warm_up(scored)
    compiled = engine()._runner.steps.num_compilations
    engine().generate([scored, pj.Request([1], max_tokens=3, sampling=pj.SamplingParams(9.0))])
    engine().generate([pj.Request(prompts()[5], max_tokens=3, logprobs=0), scored])
    assert engine()._runner.steps.num_compilations == compiled
    assert_all_free(engine())


def test_greedy_steps_compute_argmax_only():
    token_ids, batch, kv = steps._step_shapes(tiny_layout(), max_seqs=4, pages_per_seq=16, num_tokens=4, longest=1)
    batch = replace(batch, implementation="reference")

    def names(extras):
        step = partial(steps._step, TinyModel(), None)
        jaxpr = jax.make_jaxpr(step)(tiny_params(), token_ids, batch, kv, extras)
        return set(re.findall(r"argmax|top_k|random_bits|logsumexp|cond", str(jaxpr)))

    assert names(steps.Extras()) == {"argmax"}
    assert names(steps.Extras(sampling.pack([], 4))) >= {"argmax", "top_k", "random_bits", "cond"}


def test_greedy_requests_stay_greedy_beside_sampled_ones():
    assert answers()[-1].token_ids == greedy(prompts()[-1], NEW)[0]
    for prompt, answer in zip(prompts()[:-1], answers()[:-1], strict=True):
        assert answer.token_ids != greedy(prompt, NEW)[0]


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0], [3]], ids=str)
def test_a_sample_does_not_depend_on_the_batch(order):
    found = engine().generate([sampled(ignore_eos=True)[i] for i in order])
    assert tokens(found) == [tokens(answers())[i] for i in order]
    assert_all_free(engine())


def test_a_sample_does_not_depend_on_rows_and_chunks():
    made = make_engine(max_seqs=2, max_tokens_per_step=4)
    assert tokens(made.generate(sampled())) == tokens(answers())


def test_a_sample_does_not_depend_on_a_step_that_failed(monkeypatch):
    run = engine()._runner.steps.step

    def fail(*args):
        monkeypatch.setattr(engine()._runner.steps, "step", run)
        raise RuntimeError("the device was lost")

    ids = [engine().add_request(request) for request in sampled(ignore_eos=True)]
    events = [event for _ in range(4) for event in engine().step()]
    monkeypatch.setattr(engine()._runner.steps, "step", fail)
    with pytest.raises(RuntimeError, match="the device was lost"):
        engine().step()
    while step := engine().step():
        events += step
    assert [[e.token_id for e in events if e.request_id == i] for i in ids] == tokens(answers())


def test_parameters_compile_nothing():
    """One program for greedy steps, one for sampled ones, one with the tokens so far: whatever the values."""
    engine().generate(requests())
    answers()
    assert_greedy(engine().generate([pj.Request(p, max_tokens=NEW, ignore_eos=True) for p in prompts()]))
    engine().generate([pj.Request(prompts()[0], 3, sampling=pj.SamplingParams(repetition_penalty=1.5))])
    compiled = engine()._runner.steps.num_compilations
    for params in (
        pj.SamplingParams(0.3, top_k=2, seed=7),
        pj.SamplingParams(11.0, top_p=0.3, min_p=0.2),
        pj.SamplingParams(repetition_penalty=1.1),
        pj.SamplingParams(),
    ):
        asked = prompts() if params.repetition_penalty == 1 else prompts()[:1]  # of one token: a decode step alone
        engine().generate([pj.Request(prompt, max_tokens=3, sampling=params) for prompt in asked])
    assert engine()._runner.steps.num_compilations == compiled


def test_samples_have_keys_of_their_own():
    params = pj.SamplingParams(8.0, seed=3)
    request = pj.Request(prompts()[4], 5, ignore_eos=True, sampling=params, n=3)
    seen = {}
    found = engine().generate(
        [request, pj.Request([1], 2)],
        on_token=lambda index, event: seen.setdefault((index, event.sample), []).append(event.token_id),
    )
    assert [(answer.sample, len(answer.prompt_token_ids)) for answer in found] == [(0, 17), (1, 17), (2, 17), (0, 1)]
    assert tokens(found) == [seen[0, 0], seen[0, 1], seen[0, 2], seen[1, 0]]
    assert len({tuple(answer.token_ids) for answer in found}) == 4
    (alone,) = engine().generate([pj.Request(prompts()[4], 5, ignore_eos=True, sampling=params)])
    assert alone.token_ids == found[0].token_ids


def test_repetition_penalty():
    """A greedy answer with a penalty against NumPy's."""
    prompt, penalty = list(prompts()[0]), 1.3
    (answer,) = engine().generate(
        [pj.Request(prompt, NEW, ignore_eos=True, sampling=pj.SamplingParams(repetition_penalty=penalty))]
    )
    for token in answer.token_ids:
        logits = numpy_logits(np.array(prompt))
        seen = np.unique(prompt)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 1e-3, "choose another seed: a near tie says nothing"
        assert token == logits.argmax()
        prompt.append(token)


def test_logprobs_of_prompt_and_answer():
    """They are the model's own, whatever temperature and penalty make of them; prompts here are scored in chunks."""
    events = []
    found = engine().generate(
        [replace(request, logprobs=3, prompt_logprobs=True) for request in sampled(ignore_eos=True)],
        on_token=lambda index, event: events.append((index, event)),
    )
    assert tokens(found) == tokens(answers())
    for index, answer in enumerate(found):
        expected, rows = numpy_logprobs(answer.prompt_token_ids + answer.token_ids)
        np.testing.assert_allclose(answer.prompt_logprobs + answer.logprobs, expected, atol=ATOL, rtol=0)
        for top, row in zip(answer.top_logprobs, rows[-NEW:], strict=True):
            assert list(top) == np.argsort(-row)[:3].tolist()
            np.testing.assert_allclose(list(top.values()), np.sort(row)[::-1][:3], atol=ATOL, rtol=0)
        streamed = [event for i, event in events if i == index]
        assert [event.logprob for event in streamed] == answer.logprobs
        assert [event.top_logprobs for event in streamed] == answer.top_logprobs


def test_what_was_not_asked_for_is_not_given():
    plain = answers()[0]
    assert (plain.logprobs, plain.top_logprobs, plain.prompt_logprobs) == (None, None, None)
    (chosen,) = engine().generate([pj.Request([1, 2], 2, logprobs=0)])
    assert (len(chosen.logprobs), chosen.top_logprobs, chosen.prompt_logprobs) == (2, None, None)


def test_score():
    text = list(np.random.default_rng(2).integers(0, VOCAB, 47).tolist())
    running = engine().add_request(pj.Request(prompts()[1], 40, ignore_eos=True))
    np.testing.assert_allclose(engine().score(text), numpy_logprobs(text)[0], atol=ATOL, rtol=0)
    assert {event.request_id for event in engine().step()} == {running}
    while engine().step():
        pass
    assert engine().score([5]).shape == (0,)
    assert_all_free(engine())


def test_a_sequence_may_fill_the_context_when_it_is_scored():
    assert engine().score([1] * 64).shape == (63,)
    with pytest.raises(pj.RequestTooLongError, match=r"has 65 tokens, but at most 64 fit \(max_model_len 64"):
        engine().score([1] * 65)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine().score([])
    assert_all_free(engine())


def test_logits_processor():
    """Every other token is forbidden, by a function that reads the tokens so far."""

    def alternate(logits, tokens):
        lens = (tokens >= 0).sum(axis=1)
        odd = jnp.arange(logits.shape[1]) % 2 == 1
        return jnp.where(odd == (lens[:, None] % 2 == 1), logits, -jnp.inf)

    made = make_engine(logits_processor=alternate)
    greedy_answer, drawn = made.generate(
        [pj.Request([4, 2, 6], 8, logprobs=0), pj.Request([2, 3], 8, sampling=pj.SamplingParams(20.0))]
    )
    assert [token % 2 for token in greedy_answer.token_ids] == [1, 0] * 4
    assert [token % 2 for token in drawn.token_ids] == [0, 1] * 4
    prompt = [4, 2, 6]
    for token, logprob in zip(greedy_answer.token_ids, greedy_answer.logprobs, strict=True):
        logits = numpy_logits(np.array(prompt))
        allowed = np.arange(VOCAB) % 2 == len(prompt) % 2
        assert token == np.where(allowed, logits, -np.inf).argmax()
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits - 30).sum()) - 30, abs=ATOL)
        prompt.append(token)


def test_stop_ids_end_an_answer_and_are_not_text():
    expected = answers()[0].token_ids
    request = sampled(ignore_eos=True)[0]
    (answer,) = engine().generate([pj.Request(request.prompt, NEW, True, request.sampling, stop_ids=[expected[4]])])
    assert answer.token_ids == expected[: expected.index(expected[4]) + 1]
    assert answer.finish_reason == "stop"
    assert answer.text == Letters().decode(answer.token_ids[:-1])


def test_stop_strings_end_an_answer_and_are_never_streamed():
    request, text = sampled(ignore_eos=True)[0], answers()[0].text
    start = next(i for i in range(1, NEW - 3) if text.index(text[i : i + 3]) == i)
    pieces = []
    (answer,) = engine().generate(
        [pj.Request(request.prompt, NEW, True, request.sampling, stop=["never", text[start : start + 3]])],
        on_token=lambda index, event: pieces.append((event.text, event.finish_reason)),
    )
    assert answer.text == text[:start] == "".join(piece for piece, _ in pieces)
    assert answer.token_ids == answers()[0].token_ids[: start + 3]
    assert [reason for _, reason in pieces] == [None] * (start + 2) + ["stop"]
    assert answer.finish_reason == "stop"


def test_what_was_held_back_is_given_at_the_end():
    request = sampled(ignore_eos=True)[1]
    text = answers()[1].text
    (answer,) = engine().generate([pj.Request(request.prompt, NEW, True, request.sampling, stop=text[-2:] + "!")])
    assert (answer.text, answer.finish_reason) == (text, "length")
