"""SmolLM2-135M from paged memory against Hugging Face transformers' recorded tokens and logits, in float32.

tests/data/record_transformers.py made the records; its docstring says how.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models import registry
from models.transformer import functional
from scripts.benchmarks import perplexity

DATA = Path(__file__).parent / "data"
RECORD = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))["prompts"]
NEW = 64
MAX_LEN = 2048
LOGITS_ATOL = 1e-3
"""Logits are about 30; two float32 implementations that sum in different orders over 30 layers differ by some 1e-4."""


@cache
def checkpoint():
    return registry.load("smollm2-135m")


@cache
def model():
    return functional(checkpoint().config)


def requests(record=RECORD):
    return [pj.Request(prompt["prompt"], max_tokens=NEW, ignore_eos=True) for prompt in record]


def make_engine(max_seqs, **changes):
    config = pj.EngineConfig(max_seqs=max_seqs, max_model_len=MAX_LEN, **changes)
    layout = model().kv_layout(num_pages=400, page_size=16)
    return pj.Engine(model(), checkpoint().params, layout, checkpoint().tokenizer, config)


def assert_recorded(answers, record=RECORD):
    """Tokens must be equal wherever transformers' top two logits are further apart than both sides' error."""
    near_ties = sum(gap <= 2 * LOGITS_ATOL for prompt in RECORD for gap in prompt["gaps"])
    assert near_ties == 0, "record other prompts: a near tie says nothing"
    for prompt, answer in zip(record, answers, strict=True):
        assert answer.prompt_token_ids == prompt["prompt_ids"], prompt["name"]
        assert answer.token_ids == prompt["new_ids"], prompt["name"]
        assert answer.text == checkpoint().tokenizer.decode(prompt["new_ids"])


def test_records_are_varied():
    lengths = [len(prompt["prompt_ids"]) for prompt in RECORD]
    assert len(RECORD) >= 12
    assert {1, 15, 16, 17, 1500} <= set(lengths)
    assert all(len(prompt["new_ids"]) == NEW for prompt in RECORD)


def test_greedy_text_in_one_batch():
    engine = make_engine(max_seqs=len(RECORD))
    pieces = [""] * len(RECORD)

    def collect(index, event):
        pieces[index] += event.text

    answers = engine.generate(requests(), on_token=collect)
    assert_recorded(answers)
    assert pieces == [answer.text for answer in answers]
    # One program for each shape: nothing is compiled twice, nothing for a single step.
    assert engine.stats.num_compilations <= 2 * (len(engine.config.decode_sizes) + len(engine.config.prefill_sizes)) + 1


@pytest.mark.parametrize("record", [RECORD[8:9], pytest.param(RECORD, marks=pytest.mark.slow)], ids=len)
def test_greedy_text_one_by_one(record):
    engine = make_engine(max_seqs=1, max_tokens_per_step=16)
    assert_recorded([answer for request in requests(record) for answer in engine.generate([request])], record)


@pytest.mark.parametrize(("num_seqs", "new"), [(14, 12), pytest.param(len(RECORD), NEW, marks=pytest.mark.slow)])
def test_logits(num_seqs, new):
    """All prompts at once: prompts in ragged chunks, then decode steps that are fed the recorded tokens."""
    recorded = np.load(DATA / "smollm2_logits.npz")
    ids, expected = jnp.asarray(recorded["ids"][:num_seqs, :new]), recorded["logits"][:num_seqs, :new]
    chunk = 512
    layout = model().kv_layout(num_pages=400, page_size=16)
    append = jax.jit(pj.append, static_argnames="num_tokens", donate_argnums=0)
    append_decode = jax.jit(pj.append_decode, donate_argnums=0)

    @jax.jit
    def wanted_logits(params, hidden, rows, wanted):
        return jnp.take_along_axis(model().logits(params, hidden[rows]), wanted, axis=1)

    def step(cache, batch, token_ids):
        hidden, kv = run(checkpoint().params, jnp.asarray(token_ids, jnp.int32), batch, cache.kv)
        return replace(cache, kv=kv), hidden

    run = jax.jit(model(), donate_argnums=3)
    cache = pj.PagedCache.create(layout, max_seqs=num_seqs, pages_per_seq=MAX_LEN // 16)
    cache = replace(cache, kv=replace(cache.kv, pages=jnp.full_like(cache.kv.pages, jnp.nan)))
    got = np.full(expected.shape, np.nan, np.float32)
    prompts = [prompt["prompt_ids"] for prompt in RECORD[:num_seqs]]
    done = [0] * num_seqs
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        budget, counts = chunk, []
        for d, p in zip(done, prompts, strict=True):
            counts.append(min(len(p) - d, budget))
            budget -= counts[-1]
        cache, batch, ok = append(cache, jnp.asarray(counts, jnp.int32), num_tokens=chunk)
        assert ok
        packed = np.concatenate([p[d : d + c] for d, p, c in zip(done, prompts, counts, strict=True)])
        cache, hidden = step(cache, batch, np.pad(packed, (0, chunk - len(packed))))
        done = [d + c for d, c in zip(done, counts, strict=True)]
        rows = np.asarray(wanted_logits(checkpoint().params, hidden, batch.logit_rows, ids[:, 0]))
        for s, count in enumerate(counts):
            if count and done[s] == len(prompts[s]):
                got[s, 0] = rows[s]
    for position in range(1, new):
        fed = [prompt["new_ids"][position - 1] for prompt in RECORD[:num_seqs]]
        cache, batch, ok = append_decode(cache, jnp.ones(num_seqs, bool))
        assert ok
        cache, hidden = step(cache, batch, fed)
        got[:, position] = wanted_logits(checkpoint().params, hidden, batch.logit_rows, ids[:, position])
    np.testing.assert_allclose(got, expected, rtol=0, atol=LOGITS_ATOL)


PERPLEXITY_CHANGE = {"int8": 0.01, "float8_e4m3fn": 0.05}
"""Most that the perplexity of a short text may change with the dtype of the pages; README has the figures."""


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_perplexity_with_quantised_pages(kv_dtype):
    loss, exact = (loss_of(dtype) for dtype in (kv_dtype, "float32"))
    assert 2 < exact < 6, "not a language model's loss"
    assert loss != exact
    assert abs(np.expm1(loss - exact)) < PERPLEXITY_CHANGE[kv_dtype]


@cache
def loss_of(kv_dtype):
    token_ids = checkpoint().tokenizer.encode(perplexity.TEXT.read_text(encoding="utf-8"))[:129]
    return -perplexity.teacher_forced(checkpoint(), token_ids, kv_dtype, chunk=64).logprobs.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "num_pages", "changes"),
    [
        (16, 12, {"max_seqs": 4, "max_tokens_per_step": 32}),  # too few pages for all: sequences are preempted
        (16, 400, {"max_seqs": 16, "prefix_caching": False}),
        (4, 400, {"max_seqs": 4, "max_tokens_per_step": 8}),
        (64, 100, {"max_seqs": 1}),
        (4, 40, {"max_seqs": 16, "max_tokens_per_step": 512}),
        (64, 6, {"max_seqs": 4, "max_tokens_per_step": 64}),
    ],
    ids=str,
)
def test_the_memory_system_changes_no_token(page_size, num_pages, changes):
    """Every prompt twice, so that the second finds the first's pages, and two samples, which fork."""
    config = pj.EngineConfig(**({"max_model_len": 256} | changes))
    layout = model().kv_layout(num_pages=num_pages, page_size=page_size)
    engine = pj.Engine(model(), checkpoint().params, layout, None, config)
    prompts = sorted(RECORD, key=lambda prompt: len(prompt["prompt_ids"]))[3:7]
    asked = [pj.Request(prompt["prompt_ids"], max_tokens=24, n=2) for prompt in (*prompts, *prompts)]
    answers = engine.generate(asked)
    for request, pair in zip((*prompts, *prompts), zip(answers[::2], answers[1::2], strict=True), strict=True):
        for answer in pair:
            assert answer.token_ids == request["new_ids"][:24], request["name"]
    metrics = engine.metrics()
    assert metrics.pages_live == 0
    assert (metrics.prefix.hit + metrics.prefix.rehit > 0) == config.prefix_caching
    if num_pages < 100:
        assert metrics.num_preemptions > 0
