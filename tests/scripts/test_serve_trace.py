"""Traces: how they are made and read, what a replay measures."""

import json
from argparse import Namespace

import numpy as np
import pytest

import paged_jax as pj
from scripts import serve_trace, traces
from scripts.command_line import UsageError
from scripts.serve_trace import Clock, Served
from scripts.traces import TraceRequest
from tests.paged_jax.page_reader import VOCAB, PageReader, expected, reader_layout, reader_params
from tests.scripts.refusals import assert_refused

ARGS = Namespace(seed=0, requests=12, shared=40, max_tokens=4, rate=4.0)


def make(kind):
    return traces.make_trace(kind, ARGS, VOCAB)


@pytest.mark.parametrize("kind", traces.TRACES)
def test_traces_are_the_same_for_the_same_seed(kind):
    trace = make(kind)
    assert trace == make(kind)
    assert len(trace) == ARGS.requests
    assert all(request.follows is None or request.follows < index for index, request in enumerate(trace))
    assert all(0 <= token < max(VOCAB, ARGS.requests) for request in trace for token in request.token_ids)


def test_a_saved_trace_reads_back(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(vars(request)) + "\n" for request in make("chat")))
    assert traces.read_trace(path) == make("chat")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: not JSON"),
        ('{"arrival": 0, "colour": 1, "prompt": "a"}', "line 1: not a request .*colour"),
        ('{"arrival": 0}', "line 1: give either prompt or token_ids"),
        ('{"arrival": 0, "prompt": "a", "follows": 0}', "line 1: follows must name an earlier line, got 0"),
    ],
)
def test_bad_traces(tmp_path, capsys, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        traces.read_trace(path)
    status = serve_trace.main(["--trace", str(path)])
    assert_refused((status, *capsys.readouterr()), "line 1: ")


@pytest.fixture(scope="module")
def engine():
    config = pj.EngineConfig(max_seqs=4, max_model_len=512, max_tokens_per_step=64)
    return pj.Engine(PageReader(), reader_params(), reader_layout(400, 4), None, config)


def replay(engine, trace):
    engine.reset_prefix_cache()
    return serve_trace.replay(engine, trace, Clock(real=False), encode=lambda text: [ord(c) % VOCAB for c in text])


@pytest.mark.parametrize("kind", ["rag", "chat", "agent"])
def test_replay(engine, kind):
    """Every turn continues the answer before it, and hits stay within a page a request of what a prefix could give."""
    trace = [TraceRequest(**(vars(r) | {"token_ids": [t % VOCAB for t in r.token_ids]})) for r in make(kind)]
    before = engine.metrics().prefix
    served = replay(engine, trace)
    for request, record in zip(trace, served, strict=True):
        start = [] if request.follows is None else [*served[request.follows].prompt, *served[request.follows].answer]
        assert record.prompt == [*start, *request.token_ids]
        assert record.answer == expected(record.prompt, 4)
        assert record.arrival <= record.times[0][0]
        assert record.times[0] == sorted(record.times[0])
    after = engine.metrics().prefix
    hits, ideal = after.hit - before.hit, serve_trace.ideal_hits(trace, served)
    assert ideal - 4 * len(trace) <= hits <= ideal
    assert hits > 0.5 * (after.queried - before.queried)


def test_what_is_refused_is_reported_and_the_rest_served(engine):
    trace = [
        TraceRequest(0.0, token_ids=[1] * 600),
        TraceRequest(0.0, prompt="abc", max_tokens=2, n=3),
        TraceRequest(0.1, token_ids=[2], follows=1, max_tokens=1),
    ]
    served = replay(engine, trace)
    assert "at most 511 fit" in served[0].rejected
    assert {sample: len(times) for sample, times in served[1].times.items()} == {0: 2, 1: 2, 2: 2}
    assert len(served[2].prompt) == 6
    row = serve_trace.summarise(engine, trace, served, 2.0)
    assert row["rejected"] == 1
    assert row["tokens/s"] == 7 / 2
    assert json.dumps(row)
    assert "TTFT p99" in serve_trace.format_rows([row, row])


def test_an_answer_that_the_context_cuts_ends_its_request(engine):
    trace = [TraceRequest(0.0, token_ids=[1] * 510, max_tokens=9), TraceRequest(0.0, token_ids=[2], max_tokens=1)]
    served = replay(engine, trace)
    assert [len(record.answer) for record in served] == [2, 1]


def test_ideal_hits():
    trace = [TraceRequest(float(i)) for i in range(3)] + [TraceRequest(3.0, cache_salt="x")]
    prompts = ([1, 2, 3], [1, 2, 3, 4, 5], [1, 9], [1, 2, 3])
    served = [Served(float(i), prompt, answer=[4]) for i, prompt in enumerate(prompts)]
    assert serve_trace.ideal_hits(trace, served) == 0 + 4 + 1 + 0


def test_times():
    trace = [TraceRequest(0.0, n=1)]
    served = [Served(1.0, [1], {0: [3.0, 4.0, 6.0]}, [1, 2, 3])]
    config = pj.EngineConfig(max_seqs=1, max_model_len=8)
    row = serve_trace.summarise(
        pj.Engine(PageReader(), reader_params(), reader_layout(3, 4), None, config), trace, served, 5.0
    )
    assert (row["TTFT mean"], row["TPOT mean"], row["E2E mean"]) == (2.0, 1.5, 5.0)
    assert (row["ITL median"], np.isclose(row["ITL p99"], 1.99)) == (1.5, True)


def test_the_virtual_clock_skips_waits():
    clock = Clock(real=False)
    clock.wait_until(1000.0)
    assert 1000.0 <= clock.now() < 1001.0
