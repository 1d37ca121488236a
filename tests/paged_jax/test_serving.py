"""The engine as a memory manager: sharing, eviction, preemption, forks, aborts and failures never change an answer."""

import asyncio
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import paged_jax as pj
from paged_jax.engine import Engine
from tests.paged_jax.page_reader import VOCAB, PageReader, expected, reader_layout, reader_params

HEADS = [[number] * length for number, length in ((1, 4), (2, 8), (3, 9), (4, 15))]


def make_engine(num_pages=14, page_size=4, **changes):
    config = pj.EngineConfig(**({"max_seqs": 4, "max_model_len": 32, "max_tokens_per_step": 16} | changes))
    return Engine(PageReader(), reader_params(), reader_layout(num_pages, page_size), None, config)


@cache
def shared_engine(**changes):
    return make_engine(**changes)


def fresh(**changes):
    """A shared engine with nothing cached: compiling is what costs."""
    engine = shared_engine(**changes)
    engine.update_params(reader_params())  # the state machine may have left others; nothing is cached after this
    assert_all_free(engine)
    return engine


def drain(engine):
    events = []
    while not engine.is_idle:
        events += engine.step()
    return events


def assert_all_free(engine):
    metrics = engine.metrics()
    assert (metrics.pages_live, metrics.num_running, metrics.num_waiting) == (0, 0, 0)
    assert metrics.pages_cached + metrics.pages_free == engine.layout.num_pages - 1
    check(engine)


def check(engine):
    """Every reference in the pool is accounted for, by a table or by the index."""
    runner, scheduler = engine._runner, engine._scheduler
    refs = np.asarray(runner._pool.ref_counts)
    held = Counter(runner.page_ids[runner.page_ids > 0].tolist())
    named = Counter(page.page_id for page in scheduler.index._pages.values())
    assert {page: count for page, count in enumerate(refs.tolist()) if count} == dict(held + named)
    assert set(named.values()) <= {1}
    assert scheduler.index.num_unused == sum(page not in held for page in named)
    metrics = engine.metrics()
    assert min(metrics.pages_live, metrics.pages_cached, metrics.pages_free) >= 0
    assert metrics.pages_live + metrics.pages_cached + metrics.pages_free == engine.layout.num_pages - 1
    assert metrics.pages_live == len(held)
    assert 0 <= metrics.internal_waste < 1
    rows = {sequence.row: sequence for sequence in scheduler.running}
    for row, length in enumerate(runner.seq_lens.tolist()):
        assert length == (rows[row].num_stored if row in rows else 0)


def run(engine, requests):
    answers = engine.generate(requests)
    asked = [request for request in requests for _ in range(request.n)]
    for request, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == expected(request.prompt, len(answer.token_ids))
        assert answer.finish_reason == "length"
    assert_all_free(engine)
    return answers


def requests(count, seed=0, **changes):
    rng = random.Random(seed)
    return [
        pj.Request(
            rng.choice(HEADS) + [rng.randrange(VOCAB) for _ in range(rng.randrange(6))],
            max_tokens=rng.randrange(1, 10),
            n=rng.choice([1, 1, 1, 3]),
            **changes,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"num_pages": 9}, {"num_pages": 40, "page_size": 1}],
    ids=str,
)
def test_answers_do_not_depend_on_the_pool(changes):
    run(fresh(**changes), requests(20))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_soak_with_a_pool_too_small_for_all(page_size):
    engine = make_engine(num_pages=9 * (4 // page_size), page_size=page_size)
    answers = run(engine, requests(2000, seed=1))
    roomy = make_engine(num_pages=2000, page_size=page_size)
    assert [answer.token_ids for answer in answers] == [a.token_ids for a in run(roomy, requests(2000, seed=1))]
    assert engine.metrics().num_preemptions > 100
    assert engine.metrics().num_evictions > 100


def test_preemption_at_every_place_in_a_page():
    """The newer of two requests gives way after 1, 2, ... tokens, and goes on as if nothing had been."""
    engine = fresh(num_pages=9)
    before = engine.metrics().num_preemptions
    for length in range(9, 17):
        run(engine, [pj.Request([1] * length, max_tokens=31 - length), pj.Request([2] * 9, max_tokens=12)])
    assert engine.metrics().num_preemptions - before >= 8


def test_hits_are_counted_once_and_not_inflated_by_preemption():
    engine = fresh()
    before = engine.metrics().prefix
    run(engine, [pj.Request([1] * 16, max_tokens=15), pj.Request([2] * 9, max_tokens=20)])
    after = engine.metrics().prefix
    assert (after.queried - before.queried, after.hit - before.hit) == (25, 0)
    assert after.rehit > before.rehit


def test_caching_off_shares_nothing():
    engine = make_engine(prefix_caching=False)
    first, again = run(engine, [pj.Request([1] * 8, max_tokens=4)]), run(engine, [pj.Request([1] * 8, max_tokens=4)])
    assert first[0].token_ids == again[0].token_ids
    assert again[0].cached_tokens == 0
    assert engine.metrics().pages_cached == 0


def test_a_request_may_refuse_to_read_the_cache():
    engine = fresh()
    request = pj.Request([5] * 9, max_tokens=2)
    run(engine, [request])
    (answer,) = run(engine, [pj.Request([5] * 9, max_tokens=2, reads_cache=False)])
    assert answer.cached_tokens == 0
    assert run(engine, [request])[0].cached_tokens == 8


def test_salt_and_extra_keys_part_equal_prompts():
    engine = fresh(num_pages=40)
    prompt = [6] * 9
    kinds = [{}, {"cache_salt": "X"}, {"extra_keys": ("X",)}, {"cache_salt": "X", "extra_keys": ("X",)}]
    for expect in (0, 8):
        for kind in kinds:
            (answer,) = run(engine, [pj.Request(prompt, max_tokens=1, **kind)])
            assert answer.cached_tokens == expect
    assert engine.explain_prefix(prompt, cache_salt="Y").reason == "other namespace"


def test_the_answer_of_one_turn_serves_the_next():
    engine = fresh(num_pages=40)
    prompt = [7, 8, 9, 1, 2]
    (answer,) = run(engine, [pj.Request(prompt, max_tokens=12)])
    (after,) = run(engine, [pj.Request([*prompt, *answer.token_ids, 3, 4], max_tokens=4)])
    assert after.cached_tokens == 16, "all that was computed: the last token was never fed back"


def test_samples_share_the_prompt_and_part_where_they_differ():
    engine = fresh(num_pages=40)
    sampling = pj.SamplingParams(temperature=1.0, seed=3)
    request = pj.Request([1, 2, 3, 4, 5, 6], max_tokens=6, n=4, sampling=sampling)
    forked = engine.generate([request])
    assert [answer.sample for answer in forked] == [0, 1, 2, 3]
    assert [answer.cached_tokens for answer in forked] == [0, 6, 6, 6]
    assert len({tuple(answer.token_ids) for answer in forked}) > 1
    assert_all_free(engine)
    others = [pj.Request([9] * 5, max_tokens=20), pj.Request([8] * 5, max_tokens=20)]
    crowded = engine.generate([*others, request])[2:]  # two find no row to fork into, and run later on their own
    assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in forked]


def test_a_fork_with_too_few_pages_waits():
    engine = fresh(num_pages=9)
    run(engine, [pj.Request([1] * 14, max_tokens=16, n=4)])


def test_abort_gives_pages_back_and_may_be_repeated():
    roomy = {"num_pages": 40, "page_size": 1}
    for engine in (fresh(**roomy), fresh(), make_engine(num_pages=5, page_size=64)):
        for steps in range(0, 12, 2):
            ids = [engine.add_request(pj.Request([number] * 7, max_tokens=9, n=2)) for number in range(3)]
            for _ in range(steps):
                engine.step()
            for request_id in (*ids, *ids):
                engine.abort(request_id)
            assert_all_free(engine)
    with pytest.raises(ValueError, match="request_id must be one that add_request gave"):
        engine.abort(10**6)


def test_abort_of_a_request_that_finished_in_the_same_step():
    engine = fresh()
    request_id = engine.add_request(pj.Request([1] * 5, max_tokens=1))
    (event,) = engine.step()
    assert event.finish_reason == "length"
    engine.abort(request_id)
    assert_all_free(engine)


def test_abandoning_a_stream_aborts_it_and_others_go_on():
    engine = fresh()
    other = engine.stream(pj.Request([2] * 6, max_tokens=8))
    stream = engine.stream(pj.Request([1] * 6, max_tokens=8))
    seen = [next(stream).token_id, next(stream).token_id]
    stream.close()
    assert seen == expected([1] * 6, 2)
    assert [event.token_id for event in other] == expected([2] * 6, 8)
    assert_all_free(engine)


def test_streams_of_asyncio_share_steps():
    engine = fresh()
    prompts = [[number] * 5 for number in range(6)]

    async def read(prompt, limit):
        found = []
        async for event in engine.stream_async(pj.Request(prompt, max_tokens=6)):
            found.append(event.token_id)
            if len(found) == limit:
                break
        return found

    async def everything():
        return await asyncio.gather(*(read(prompt, 6 if i else 2) for i, prompt in enumerate(prompts)))

    for i, (prompt, found) in enumerate(zip(prompts, asyncio.run(everything()), strict=True)):
        assert found == expected(prompt, 6 if i else 2)
    drain(engine)
    assert_all_free(engine)


def test_new_parameters_never_meet_old_pages():
    engine = make_engine(num_pages=40)
    run(engine, [pj.Request([1] * 9, max_tokens=3, extra_keys=("adapter",))])
    compiled = engine.metrics().num_compilations
    engine.update_params(reader_params(5))
    (answer,) = engine.generate([pj.Request([1] * 9, max_tokens=3, extra_keys=("adapter",))])
    assert answer.cached_tokens == 0
    assert answer.token_ids == expected([1] * 9, 3, shift=5)

    engine.add_request(pj.Request([2] * 9, max_tokens=4))
    events = engine.step()
    with pytest.raises(pj.EngineBusyError, match="1 requests are running with the old parameters"):
        engine.update_params(reader_params(0))
    engine.update_params(reader_params(0), recompute=True)
    events += drain(engine)
    first = expected([2] * 9, 1, shift=5)
    assert [event.token_id for event in events] == first + expected([2] * 9 + first, 3)
    with pytest.raises(ValueError, match="params must have the tree, shapes and dtypes"):
        engine.update_params({"shift": np.zeros(2, np.int32)})
    assert engine.metrics().num_compilations - compiled <= 1  # release of pages
    assert_all_free(engine)


def test_reset_refuses_while_pages_are_in_use():
    engine = fresh()
    engine.add_request(pj.Request([1] * 9, max_tokens=6))
    engine.step()
    with pytest.raises(pj.EngineBusyError, match="running requests use 2 cached pages"):
        engine.reset_prefix_cache()
    engine.reset_prefix_cache(force=True)
    check(engine)
    drain(engine)
    assert engine.metrics().pages_cached == 0, "the forgotten pages are not named again, nor those that follow them"
    assert_all_free(engine)


def test_a_step_that_raises_loses_no_request(monkeypatch):
    engine = fresh()
    ids = [engine.add_request(pj.Request([number] * 9, max_tokens=5)) for number in (1, 1, 2)]
    events = engine.step()
    events += engine.step()

    def fail(*args, **kwargs):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.steps, "step", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
    assert len(engine._scheduler.index) == 0
    check(engine)
    events += drain(engine)
    for request_id, number in zip(ids, (1, 1, 2), strict=True):
        assert [e.token_id for e in events if e.request_id == request_id] == expected([number] * 9, 5)
    assert_all_free(engine)


@pytest.mark.parametrize("window", [1, 6])
def test_pages_behind_the_window_of_all_layers_go_back(window):
    engine = make_engine(num_pages=40, max_model_len=64, sliding_window=window)
    engine.add_request(pj.Request([1] * 5, max_tokens=50))
    most = 0
    while not engine.is_idle:
        engine.step()
        metrics = engine.metrics()
        most = max(most, metrics.pages_live)
        assert metrics.pages_live + metrics.pages_cached + metrics.pages_free == 39
    assert most <= (window + 3) // 4 + 4 + 1  # a window, the page it begins in, a chunk of 16
    assert engine.metrics().pages_live == 0


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_nothing_compiles_after_warm_up(count):
    engine = make_engine(num_pages=9)
    engine.warm_up()
    compiled = engine.metrics().num_compilations
    run(engine, requests(count, seed=2))
    assert engine.metrics().num_preemptions
    assert engine.metrics().num_compilations == compiled


def test_explain_prefix():
    engine = fresh(num_pages=40)
    run(engine, [pj.Request([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)])
    assert engine.explain_prefix([1, 2, 3, 4, 5, 6, 0, 8]) == pj.PrefixMatch(4, "first different token", 6)
    assert engine.explain_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == pj.PrefixMatch(8, "page not full", 8)


class EngineMachine(RuleBasedStateMachine):
    """Operations in any order on one engine; what finishes is right, and the pool's books balance after each."""

    @initialize()
    def start(self):
        self.engine = shared_engine(num_pages=9)
        for request_id in list(self.engine._requests):
            self.engine.abort(request_id)  # of an example that failed
        self.engine.reset_prefix_cache()
        self.shift = 0
        self.engine.update_params(reader_params(0))
        self.asked = {}
        self.tokens = {}

    @rule(
        head=st.sampled_from(HEADS),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=5),
        max_tokens=st.integers(1, 9),
        n=st.sampled_from([1, 1, 2, 4]),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, head, tail, max_tokens, n, salt):
        request = pj.Request(head + tail, max_tokens=max_tokens, n=n, cache_salt=salt)
        request_id = self.engine.add_request(request)
        self.asked[request_id] = request
        self.tokens |= {(request_id, sample): [] for sample in range(n)}

    @rule(count=st.integers(1, 4), max_steps=st.sampled_from([1, 1, 2, 8]))
    def step(self, count, max_steps):
        for _ in range(count):
            self.take(self.engine.step(max_steps=max_steps))

    def take(self, events):
        for event in events:
            tokens = self.tokens[event.request_id, event.sample]
            context = [*self.asked[event.request_id].prompt, *tokens]
            assert event.token_id == expected(context, 1, self.shift)[0]
            tokens.append(event.token_id)
            assert (event.finish_reason is None) == (len(tokens) < self.asked[event.request_id].max_tokens)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.abort(request_id)
        self.tokens = {key: tokens for key, tokens in self.tokens.items() if key[0] != request_id}
        self.asked.pop(request_id)

    @rule(force=st.booleans())
    def reset(self, force):
        metrics = self.engine.metrics()
        try:
            self.engine.reset_prefix_cache(force=force)
        except pj.EngineBusyError:
            assert metrics.num_running
            assert not force

    @rule(shift=st.integers(0, 3))
    def new_parameters(self, shift):
        self.engine.update_params(reader_params(shift), recompute=True)
        self.shift = shift

    @rule(max_steps=st.sampled_from([1, 8]))
    def failing_step(self, max_steps):
        steps = self.engine._runner.steps
        original = steps.step

        def fail(*args, **kwargs):
            raise RuntimeError("failed")

        steps.step = fail
        try:
            self.engine.step(max_steps=max_steps)
        except RuntimeError:
            pass
        finally:
            steps.step = original

    @invariant()
    def books_balance(self):
        if hasattr(self, "engine"):
            check(self.engine)

    def teardown(self):
        if hasattr(self, "engine"):
            self.take(drain(self.engine))
            for (request_id, _), tokens in self.tokens.items():
                assert len(tokens) == self.asked[request_id].max_tokens
            assert_all_free(self.engine)


EngineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
