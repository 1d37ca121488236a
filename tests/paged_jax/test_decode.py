"""Decode steps that follow one another in one call of the device give what single steps give."""

import itertools
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

import paged_jax as pj
from paged_jax import decode
from paged_jax.engine import Engine
from paged_jax.steps import Extras
from tests.paged_jax.page_reader import VOCAB, PageReader, expected, reader_layout, reader_params
from tests.paged_jax.test_scheduler import Machine
from tests.paged_jax.test_serving import assert_all_free, check
from tests.paged_jax.tiny import Letters

STEPS = 8


class EndlessLetters(Letters):
    """None ends an answer."""

    eos_ids = frozenset()


class Record(NamedTuple):
    """What a step of the loop saw, in the place of its output and of the pages."""

    tokens: jax.Array
    seen: tuple = ()


def recording(params, token_ids, batch, kv, extras):
    """The next token is one more, and `kv` counts the steps."""
    seen = (token_ids, batch.positions, batch.seq_lens, batch.slot_mapping, extras.context)
    return Record(token_ids + 1, seen), kv + 1


@pytest.mark.parametrize("stops_together", [False, True])
def test_the_loop_feeds_each_row_until_it_ends(stops_together):
    """Pages of 2; rows: cut after four steps; ends at token 22; rests; its first token is in the pages already; and
    one row of padding."""
    tables = np.array([[5, 1, 3], [2, 6, 0], [0, 0, 0], [4, 7, 0]], np.int32)
    lens, stored, limits = np.array([[1, 2, 0, 1], [1, 2, 0, 2], [4, 4, 0, 4]], np.int32)
    given = decode.pack(
        tables, lens, stored, limits, [(), (7, 22)], np.arange(5, dtype=np.int32), stops_together=stops_together
    )
    tables = given.block_tables
    context = np.full((5, 6), -1, np.int32)
    loop = jax.jit(partial(decode.loop, recording, page_size=2, max_steps=6, implementation=None))
    token_ids = np.array([10, 20, 0, 40, 0], np.int32)
    outputs, steps = loop(None, token_ids, given, np.int32(0), Extras(context=context))

    num_steps = 2 if stops_together else 4
    assert int(steps) == num_steps
    active = {0: 4, 1: 2, 3: 4}  # row: steps
    fed, positions, seq_lens, slots, contexts = (np.asarray(x) for x in outputs.seen)
    for step in range(num_steps):
        for row in range(5):
            found = (positions[step, row], seq_lens[step, row], slots[step, row])
            if step >= active.get(row, 0):
                assert found == (0, 0, -1)
                continue
            place = lens[row] + step
            slot = tables[row, place // 2] * 2 + place % 2
            assert found == (place, place + 1, -1 if place < stored[row] else slot)
            assert fed[step, row] == token_ids[row] + step
            assert outputs.tokens[step, row] == token_ids[row] + step + 1
            told = np.full(6, -1)
            told[lens[row] + 1 : place + 1] = token_ids[row] + 1 + np.arange(step)
            assert contexts[step, row].tolist() == told.tolist()


@cache
def shared_engine(num_pages=100, page_size=4, window=None):
    config = pj.EngineConfig(
        max_seqs=4, max_model_len=48, max_tokens_per_step=16, decode_steps=STEPS, sliding_window=window
    )
    return Engine(PageReader(window), reader_params(), reader_layout(num_pages, page_size), EndlessLetters(), config)


def drive(engine, requests, max_steps):
    """Events of requests that find nothing cached, their ids counted from 0; the names of the pages that are cached
    in the end; how many calls of the device it took; and of each, how many tokens it gave."""
    engine.reset_prefix_cache()
    engine._scheduler._free_rows.sort(reverse=True)  # rows, and so the order of events, as in a new engine
    first, *_ = [engine.add_request(request) for request in requests]
    events, calls = [], []
    while not engine.is_idle:
        new = engine.step(max_steps=max_steps)
        check(engine)
        events += [event._replace(request_id=event.request_id - first) for event in new]
        calls.append(len(new))
    assert_all_free(engine)
    return events, set(engine._scheduler.index._pages), calls


def mixed(**changes):
    """More requests than rows, of many lengths; the answer of one meets its end token early."""
    prompts = [[1] * 3, [2, 3, 4, 5, 6], [7] * 8, [1, 2], [9] * 13, [8, 3], [5]]
    limits = [20, 7, 1, 33, 9, 12, 8]
    requests = [
        pj.Request(prompt, max_tokens=limit, n=3 if prompt == [1, 2] else 1, **changes)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    return [*requests, stopped(**changes)]


def stopped(**changes):
    """Ends at its stop token, the third to the seventh of its answer: in the midst of its first decode steps."""
    for prompt in itertools.product(range(VOCAB), repeat=3):
        answer = expected(prompt, STEPS)
        for place in range(2, 7):
            if answer[place] not in answer[:place] and len(set(answer)) < VOCAB:
                never = next(token for token in range(VOCAB) if token not in answer)
                return pj.Request(list(prompt), max_tokens=30, stop_ids=[answer[place], never], **changes)
    raise AssertionError("no such prompt")


@pytest.mark.parametrize(
    ("page_size", "changes"),
    [
        (1, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(16, {}, marks=pytest.mark.slow),
        pytest.param(
            4, {"sampling": pj.SamplingParams(temperature=0.7, seed=5), "logprobs": 2}, marks=pytest.mark.slow
        ),
        (4, {"sampling": pj.SamplingParams(temperature=0.7, repetition_penalty=1.5), "logprobs": 0}),
    ],
    ids=str,
)
def test_events_are_those_of_single_steps(page_size, changes):
    """Tokens, log probabilities and ends, in the same order; and the same pages are cached afterwards."""
    engine = shared_engine(num_pages=400 // page_size, page_size=page_size)
    events, cached, calls = drive(engine, mixed(**changes), STEPS)
    single, cached_before, single_calls = drive(engine, mixed(**changes), 1)
    assert events == single
    assert cached == cached_before
    assert len(calls) < 0.6 * len(single_calls)
    if not changes:
        for request_id, request in enumerate(mixed()):
            for sample in range(request.n):
                tokens = [e.token_id for e in events if (e.request_id, e.sample) == (request_id, sample)]
                assert tokens == expected(request.prompt, len(tokens))
                assert len(tokens) == request.max_tokens or tokens[-1] in request.stop_ids
        assert any(event.finish_reason == "stop" for event in events)


def test_one_sequence_takes_as_few_calls_as_can_be():
    _, _, calls = drive(shared_engine(), [pj.Request([1, 2, 3], max_tokens=1 + 2 * STEPS + 3)], STEPS)
    assert calls == [1, STEPS, STEPS, 3]


def test_a_call_ends_with_the_first_sequence_when_another_waits_for_its_row():
    requests = [pj.Request([number] * 3, max_tokens=limit) for number, limit in enumerate((4, 30, 30, 30, 5))]
    events, _, calls = drive(shared_engine(), requests, STEPS)
    assert calls[:3] == [4, 3 * 4, 4], "three decode steps end the first request; then the last one is prefilled"
    assert [e.token_id for e in events if e.request_id == 4] == expected([4] * 3, 5)


def test_pages_taken_ahead_are_live_until_the_call_ends():
    engine = shared_engine()
    engine.reset_prefix_cache()
    request = stopped()
    engine.add_request(request)
    engine.step()
    engine.stats.peak_pages = 0
    events = engine.step(max_steps=STEPS)
    assert 2 <= len(events) <= 6
    assert engine.is_idle
    assert engine.stats.peak_pages == 3, "room for eight tokens after the three of the prompt"
    assert engine.metrics().pages_cached == (3 + len(events)) // 4
    assert_all_free(engine)


def test_statistics_count_each_step():
    engine = shared_engine()
    totals = []
    for max_steps in (1, STEPS):
        before = replace(engine.stats)
        drive(engine, mixed(), max_steps)
        totals.append(
            [getattr(engine.stats, name) - getattr(before, name) for name in ("prefill_tokens", "decode_tokens")]
        )
    assert totals[0] == totals[1]
    before = replace(engine.stats)
    engine.generate([pj.Request([1, 2, 3], max_tokens=6)])
    assert engine.stats.live_tokens - before.live_tokens == 3 + 4 + 5 + 6 + 7 + 8
    assert engine.stats.live_slots - before.live_slots == 4 + 5 * 8


def test_an_answer_serves_the_next_turn():
    """Pages that were filled inside a call have names."""
    engine = shared_engine()
    engine.reset_prefix_cache()
    prompt = [7, 8, 9, 1, 2]
    (answer,) = engine.generate([pj.Request(prompt, max_tokens=20)])
    (after,) = engine.generate([pj.Request([*prompt, *answer.token_ids, 3, 4], max_tokens=4)])
    assert after.cached_tokens == 24
    assert after.token_ids == expected(after.prompt_token_ids, 4)


def test_pages_behind_the_window_go_back_between_calls():
    window = 6
    engine = shared_engine(window=window)
    request = pj.Request([1] * 5, max_tokens=40)
    engine.add_request(request)
    tokens, live = [], []
    while not engine.is_idle:
        tokens += [event.token_id for event in engine.step(max_steps=STEPS)]
        live.append(engine.metrics().pages_live)
    assert tokens == expected(request.prompt, 40, window=window)
    assert max(live[1:]) <= (window + 3) // 4 + 1
    assert live[-1] == 0


def test_a_small_pool_falls_back_to_single_steps():
    engine = shared_engine(num_pages=13)
    requests = [pj.Request([number] * 9, max_tokens=30) for number in range(3)]
    before = engine.metrics().num_preemptions
    events, _, calls = drive(engine, requests, STEPS)
    for request_id, request in enumerate(requests):
        tokens = [event.token_id for event in events if event.request_id == request_id]
        assert tokens == expected(request.prompt, 30)
    assert engine.metrics().num_preemptions > before
    assert max(calls) >= STEPS
    assert sum(0 < call <= 2 for call in calls) > 3


@pytest.mark.parametrize("max_steps", [1, STEPS])
def test_abort_between_calls(max_steps):
    engine = shared_engine()
    gone, kept = [engine.add_request(pj.Request([number] * 6, max_tokens=30)) for number in (1, 2)]
    events = engine.step()
    events += engine.step(max_steps=max_steps)
    engine.abort(gone)
    check(engine)
    while not engine.is_idle:
        events += engine.step(max_steps=STEPS)
    assert [event.token_id for event in events if event.request_id == kept] == expected([2] * 6, 30)
    assert_all_free(engine)


def test_a_call_that_raises_loses_no_request(monkeypatch):
    engine = shared_engine()
    ids = [engine.add_request(pj.Request([number] * 6, max_tokens=20)) for number in (1, 2)]
    events = engine.step()
    events += engine.step(max_steps=STEPS)

    def fail(*args):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.steps, "step", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step(max_steps=STEPS)
    check(engine)
    while not engine.is_idle:
        events += engine.step(max_steps=STEPS)
    for request_id, number in zip(ids, (1, 2), strict=True):
        assert [e.token_id for e in events if e.request_id == request_id] == expected([number] * 6, 20)
    assert_all_free(engine)


def test_single_steps_where_only_the_host_sees_an_end():
    engine = shared_engine()
    prompt = next(p for p in itertools.product(range(VOCAB), repeat=3) if len(set(expected(p, 9))) <= 2)
    others = [token for token in range(VOCAB) if token not in expected(prompt, 9)][:9]
    for changes in ({"stop": "zzz"}, {"stop_ids": others}):
        requests = [pj.Request(list(prompt), max_tokens=9, **changes), pj.Request([4], max_tokens=13)]
        *_, calls = drive(engine, requests, STEPS)
        assert calls == [2] * 9 + [4], "once the other is alone, steps follow one another"


def test_single_steps_for_those_who_wait_for_tokens():
    engine = shared_engine()
    request = pj.Request([1, 2, 3], max_tokens=9)
    stream = engine.stream(request)
    assert next(stream).token_id == expected([1, 2, 3], 1)[0]
    assert len(engine.step(max_steps=STEPS)) == 1
    stream.close()

    def count_steps(**callbacks):
        seen = []
        original = engine._runner.run

        def run(plan, make_extras):
            seen.append(plan.num_steps)
            return original(plan, make_extras)

        engine._runner.run = run
        engine.generate([request], **callbacks)
        del engine._runner.run
        return len(seen)

    assert count_steps() == 2
    assert count_steps(on_token=lambda index, event: None) == 9
    assert count_steps(on_step=lambda: None) == 9


def test_max_steps_and_decode_steps_are_checked():
    with pytest.raises(ValueError, match=r"max_steps must be in 1..decode_steps = 8, got 9"):
        shared_engine().step(max_steps=9)
    with pytest.raises(ValueError, match=r"max_steps must be in 1..decode_steps = 8, got 0"):
        shared_engine().step(max_steps=0)
    with pytest.raises(ValueError, match="decode_steps must be at least 1, got 0"):
        pj.EngineConfig(decode_steps=0)


def test_steps_follow_one_another_only_if_nothing_comes_between():
    def planned(machine, max_steps=STEPS):
        plan = machine.scheduler.plan(len(machine.free), machine.give_way, max_steps)
        return plan.num_steps, plan.num_new_pages, plan.stops_together

    machine = Machine(num_pages=40, max_seqs=2)
    machine.add([1] * 3, new=20)
    machine.step()
    assert planned(machine) == (STEPS, 2, False)
    assert planned(machine, 1) == (1, 0, False)

    machine.add([2] * 20, new=20)
    assert planned(machine)[0] == 1, "a prompt beside it"
    for _ in range(3):
        machine.step()
    assert planned(machine)[0] == STEPS
    machine.add([3] * 3)
    assert planned(machine)[::2] == (STEPS, True), "it could not be admitted before one of the two ends"

    machine = Machine(num_pages=40, max_seqs=2)
    machine.add([1] * 3, new=3)
    machine.step()
    assert planned(machine) == (STEPS, 1, False), "two more tokens, the first of which begins a page"

    machine = Machine(num_pages=6, max_seqs=2)
    machine.add([1] * 3, new=12)
    machine.step()
    machine.add([2] * 18, new=1)
    assert planned(machine) == (1, 0, False), "a row is free: room for the other's pages may come at any time"

    for num_pages, found in ((6, (1, 0, False)), (7, (STEPS, 4, False))):
        machine = Machine(num_pages=num_pages)
        machine.add([1] * 3, new=12)
        machine.add([2] * 3, new=12)
        machine.step()
        assert planned(machine) == found
