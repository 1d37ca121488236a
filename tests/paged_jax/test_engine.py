"""The engine with a tiny model whose greedy answers a NumPy model without a cache gives too."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from paged_jax.engine import Engine
from tests.paged_jax.tiny import VOCAB, Letters, TinyModel, greedy, numpy_int8, tiny_layout, tiny_params

NEW = 9
MIN_GAP = 1e-3
"""Logits are about 30 and computed in float32 with an error near 1e-5; greedy tokens must agree above this gap."""


def config(**changes):
    return pj.EngineConfig(**({"max_seqs": 4, "max_model_len": 64, "max_tokens_per_step": 16} | changes))


@cache
def shared_engine(**changes):
    """One engine for all tests that leave it as they found it: compiling is what costs here."""
    return make_engine(**changes)


@cache
def small_engine():
    """13 pages of 4 tokens: the longest of `requests` needs 12 of them."""
    return make_engine(tiny_layout(num_pages=14))


def make_engine(layout=None, tokenizer=None, logits_processor=None, **changes):
    engine_config = config(**changes)
    return Engine(
        TinyModel(), tiny_params(), layout or tiny_layout(), tokenizer, engine_config, logits_processor=logits_processor
    )


def prompts(lengths=(1, 3, 4, 5, 17, 40)):
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, VOCAB, length).tolist()) for length in lengths]


def requests(max_tokens=NEW):
    return [pj.Request(prompt, max_tokens=max_tokens) for prompt in prompts()]


def assert_greedy(answers, asked=None, new=NEW):
    for prompt, answer in zip(asked or prompts(), answers, strict=True):
        expected, gap = greedy(prompt, new)
        assert gap > MIN_GAP, "choose another seed: a near tie says nothing"
        assert answer.token_ids == expected
        assert answer.prompt_token_ids == list(prompt)
        assert answer.finish_reason == "length"


def assert_all_free(engine):
    metrics = engine.metrics()
    assert metrics.pages_live == 0
    assert metrics.pages_cached + metrics.pages_free == engine.layout.num_pages - 1
    assert not engine._runner.page_ids.any()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 64])
def test_greedy_answers_for_every_page_size(page_size):
    engine = make_engine(tiny_layout(num_pages=1 + 4 * (64 // page_size), page_size=page_size))
    assert_greedy(engine.generate(requests()))
    assert_all_free(engine)


@pytest.mark.parametrize(
    "changes",
    [{"max_seqs": 1}, {"max_tokens_per_step": 4}, pytest.param({"max_tokens_per_step": 128}, marks=pytest.mark.slow)],
    ids=str,
)
def test_batch_and_chunks_change_nothing(changes):
    assert_greedy(make_engine(**changes).generate(requests()))


def test_a_quantised_pool():
    """The tokens of a model whose keys and values are rounded to int8, in pages of 12 instead of 32 bytes a head."""
    engine = make_engine(tiny_layout(dtype=jnp.int8))
    assert engine.layout.bytes_per_page * 32 == tiny_layout().bytes_per_page * 12
    for prompt, answer in zip(prompts(), engine.generate(requests()), strict=True):
        expected, gap = greedy(prompt, NEW, numpy_int8)
        assert gap > 0.1, "choose another seed: near a tie, a code rounded the other way decides"
        assert answer.token_ids == expected


def test_a_pool_too_small_for_all_makes_requests_wait():
    engine = small_engine()
    assert_greedy(engine.generate(requests()))
    assert engine.stats.peak_pages <= 13
    assert_all_free(engine)


def test_requests_can_join_while_others_run():
    engine = shared_engine()
    first = engine.add_request(requests()[4])
    events = [event for _ in range(3) for event in engine.step()]
    second = engine.add_request(requests()[2])
    while not engine.is_idle:
        events += engine.step()
    for request_id, index in ((first, 4), (second, 2)):
        tokens = [event.token_id for event in events if event.request_id == request_id]
        assert tokens == greedy(prompts()[index], NEW)[0]


def test_pages_are_taken_one_by_one():
    engine = shared_engine()
    engine.add_request(pj.Request(prompts()[2], max_tokens=12))  # 4 tokens: one page of 4
    live = []
    while not engine.is_idle:
        engine.step()
        live.append(engine.metrics().pages_live)
    assert live == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 0]  # the last step has released them


def test_stats():
    engine = make_engine()
    engine.generate([pj.Request(prompts()[2], max_tokens=4), pj.Request(prompts()[3], max_tokens=4)])
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (9, 6)
    assert (stats.peak_pages, stats.peak_seqs) == (4, 2)
    tokens, pages = (4 + 5, 5 + 6, 6 + 7, 7 + 8), (3, 4, 4, 4)
    assert stats.internal_waste == pytest.approx(1 - sum(tokens) / (4 * sum(pages)))
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


def test_on_token_gives_every_token_in_order():
    seen = {index: [] for index in range(6)}
    answers = shared_engine().generate(requests(), on_token=lambda index, event: seen[index].append(event))
    for index, answer in enumerate(answers):
        assert [event.token_id for event in seen[index]] == answer.token_ids
        assert [event.finish_reason for event in seen[index]] == [None] * (NEW - 1) + ["length"]


def test_bare_prompts_stand_for_requests():
    (answer,) = make_engine(max_model_len=8).generate([[1, 2, 3]])
    assert answer.token_ids == greedy((1, 2, 3), 5)[0]  # as many as the context holds


def test_end_token_stops_the_answer_and_is_not_text():
    stopping = None
    for prompt in itertools.product(range(20), repeat=2):
        expected, gap = greedy(prompt, 6)
        if 3 in expected[1:5] and gap > MIN_GAP:
            stopping = prompt, expected[: expected.index(3) + 1]
            break
    assert stopping is not None
    prompt, expected = stopping
    engine = make_engine(tokenizer=Letters())
    text = Letters().decode(prompt)
    events = []
    stopped, ignoring = engine.generate(
        [pj.Request(text, max_tokens=6), pj.Request(text, max_tokens=6, ignore_eos=True)],
        on_token=lambda index, event: events.append((index, event)),
    )
    assert stopped.token_ids == expected
    assert stopped.finish_reason == "stop"
    assert stopped.text == Letters().decode(expected[:-1])
    assert "".join(event.text for index, event in events if index == 0) == stopped.text
    assert ignoring.token_ids == greedy(prompt, 6)[0]
    assert ignoring.finish_reason == "length"
    assert_all_free(engine)


class FailingModel(TinyModel):
    """Raises when it is traced for the n-th time."""

    def __init__(self, fails_at):
        self.traces = 0
        self.fails_at = fails_at

    def __call__(self, *args):
        self.traces += 1
        if self.traces == self.fails_at:
            raise RuntimeError("the model broke")
        return super().__call__(*args)


@pytest.mark.parametrize("fails_at", [2, 3])  # the first trace finds the vocabulary
def test_a_step_that_raises_loses_no_request(fails_at):
    engine = Engine(FailingModel(fails_at), tiny_params(), tiny_layout(), None, config())
    ids = [engine.add_request(request) for request in requests()]
    events = []
    for step in range(1, 40):
        if step == fails_at - 1:
            with pytest.raises(RuntimeError, match="the model broke"):
                engine.step()
            assert_all_free(engine)
        events += engine.step()
    for request_id, prompt in zip(ids, prompts(), strict=True):
        tokens = [event.token_id for event in events if event.request_id == request_id]
        assert tokens == greedy(prompt, NEW)[0]
    assert_all_free(engine)


def test_after_warm_up_nothing_compiles():
    engine = make_engine(max_seqs=12)  # three decode shapes
    engine.warm_up()
    compiled = engine._runner.steps.num_compilations
    assert_greedy(engine.generate(requests()))
    engine.generate([pj.Request(prompts()[0], max_tokens=20)])
    assert engine._runner.steps.num_compilations == compiled
    assert engine.stats.num_compilations == compiled


def test_warm_up_changes_no_answer():
    engine = make_engine()
    engine.warm_up()
    assert_greedy(engine.generate(requests()))
    assert_all_free(engine)


def test_steady_decoding_traces_the_model_once_for_each_shape():
    model = FailingModel(fails_at=-1)
    engine = Engine(model, tiny_params(), tiny_layout(), None, config())
    engine.generate([pj.Request(prompts()[1], max_tokens=40)])
    assert model.traces == 3  # the vocabulary, one prefill shape, one decode shape
    engine.generate([pj.Request(prompts()[1], max_tokens=30), pj.Request(prompts()[3], max_tokens=40)])
    assert model.traces == 3


def test_named_implementation_is_used_and_said():
    assert make_engine(implementation="reference").implementation == "reference (asked for)"
    assert make_engine().implementation == f"xla (default on {jax.default_backend()})"
    assert_greedy(make_engine(implementation="reference").generate(requests()))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (pj.Request("text"), ValueError, "the engine has no tokenizer; give token ids"),
        (pj.Request([1], stop="a"), ValueError, "stop strings need a tokenizer"),
        (pj.Request([1, 29, 3]), ValueError, r"the prompt has token 29, outside the model's vocabulary 0..28"),
        (pj.Request([1, -1]), ValueError, r"the prompt has token -1, outside the model's vocabulary 0..28"),
        (pj.Request([1], stop_ids=[29]), ValueError, r"stop_ids has token 29, outside the model's vocabulary 0..28"),
        (pj.Request([1] * 52, max_tokens=1), pj.RequestTooLongError, "has 52 tokens, but at most 51 fit"),
        (pj.Request([1] * 50, max_tokens=9), pj.RequestTooLongError, "lower max_tokens to at most 2"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_any_other_runs(request_, error, message):
    engine = small_engine()  # its pool holds 52 tokens
    with pytest.raises(error, match=message):
        engine.generate([requests()[0], request_])
    assert engine.step() == []
    with pytest.raises(error, match=message):
        engine.add_request(request_)
    assert engine.step() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "the prompt is empty; give at least one token"),
        ({"prompt": ""}, "the prompt is empty; give at least one token"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"logprobs": -1}, r"logprobs must be in 0..20, or None for none, got -1"),
        ({"logprobs": 21}, r"logprobs must be in 0..20, or None for none, got 21"),
    ],
)
def test_requests_are_checked_when_made(fields, message):
    with pytest.raises(ValueError, match=message):
        pj.Request(**({"prompt": [1]} | fields))


def test_the_context_cuts_an_answer():
    engine = make_engine(max_model_len=20)
    (answer,) = engine.generate([pj.Request(prompts()[4], max_tokens=NEW)])
    assert answer.token_ids == greedy(prompts()[4], 3)[0]
    with pytest.raises(pj.RequestTooLongError, match="has 20 tokens, but at most 19 fit"):
        engine.generate([[1] * 20])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqs": 0}, "max_seqs must be at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"max_tokens_per_step": 3}, "max_tokens_per_step must be at least max_seqs = 4"),
        ({"memory_utilization": 0.0}, r"memory_utilization must be in \(0, 1\], got 0.0"),
        ({"memory_utilization": 1.1}, r"memory_utilization must be in \(0, 1\], got 1.1"),
        ({"implementation": "triton"}, "implementation must be one of .*xla.* or None, got 'triton'"),
    ],
)
def test_config_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_shapes_are_few():
    assert config(max_seqs=32, max_tokens_per_step=512).decode_sizes == (1, 8, 16, 32)
    assert config(max_seqs=100, max_tokens_per_step=100).decode_sizes == (1, 8, 16, 32, 48, 64, 96, 100)
    assert config(max_seqs=3).decode_sizes == (3,)
    assert config(max_tokens_per_step=100).prefill_sizes == (16, 32, 64, 100)
    assert config(max_tokens_per_step=600).prefill_sizes == (16, 32, 64, 128, 256, 320, 384, 448, 512, 600)
    assert config(max_seqs=1, max_tokens_per_step=4).prefill_sizes == (4,)


def test_nothing_to_do():
    engine = shared_engine()
    assert engine.is_idle
    assert engine.step() == []
