"""The contiguous rival is fair only if it computes the same; every command runs, on a tiny model."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models import registry
from models.linear import linear
from models.transformer import functional
from paged_jax import batch as batches
from scripts import benchmark
from scripts.benchmarks import contiguous, products
from scripts.benchmarks.floor import Chunk, Floor, Rates
from scripts.benchmarks.perplexity import teacher_forced
from tests.models.test_architectures import LOGITS, PREFILLS, TOLERANCE, checkpoint, token_ids
from tests.scripts.refusals import assert_refused


def test_contiguous_attention_gives_gemma2s_logits():
    """Scale, windows and soft caps are all in it."""
    config, params = checkpoint("gemma2")
    model = functional(config, attention=contiguous.decode_attention, unroll_layers=True)
    length = len(token_ids()[1])
    kv = contiguous.create(config, 2, length, jnp.float32)

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


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, make_tiny):
    return str(make_tiny().write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.mark.slow
def test_the_contiguous_server_answers_as_the_engine_does(model_path):
    """More requests than rows, answers of one token among them, prompts and contexts over several powers of two."""
    tiny = registry.load(model_path)
    rng = np.random.default_rng(0)
    vocab_size = tiny.config.vocab_size
    requests = [(rng.integers(0, vocab_size, n).tolist(), m) for n, m in ((3, 9), (20, 1), (15, 6), (1, 12), (17, 2))]
    server = contiguous.ContiguousServer(tiny, num_seqs=2, max_len=32, dtype=jnp.float32)
    model = functional(tiny.config)
    config = pj.EngineConfig(max_seqs=2, max_model_len=32, max_tokens_per_step=32)
    engine = pj.Engine(model, tiny.params, model.kv_layout(num_pages=9, page_size=8), None, config)
    answers = engine.generate([pj.Request(prompt, max_tokens=count, ignore_eos=True) for prompt, count in requests])
    assert server.generate(requests) == [answer.token_ids for answer in answers]

    text = [*requests[1][0], *answers[1].token_ids]
    scores = teacher_forced(tiny, text, jnp.float32, page_size=4, chunk=8)
    atol = 1e-5 * np.abs(scores.logprobs).max()
    np.testing.assert_allclose(scores.logprobs, engine.score(text), rtol=0, atol=atol)
    assert scores.likeliest[-1] == text[-1]
    (top,) = engine.generate([pj.Request(text[:-1], max_tokens=1, logprobs=2)])
    best, second = top.top_logprobs[0].values()
    assert scores.gaps[-1] == pytest.approx(best - second, abs=atol)


def test_products_are_those_of_the_floor(model_path, monkeypatch):
    """All operations of a step but those of attention."""
    tiny = registry.load(model_path)
    shapes = []

    def recorded(x, weight, out_dtype):
        shapes.append((*x.shape, weight.shape[0]))
        return linear(x, weight, out_dtype)

    monkeypatch.setattr(products, "linear", recorded)
    assert products.products(tiny.params, 3)() > 0
    config = tiny.config
    attention = 4 * 3 * config.num_layers * config.num_heads * config.head_dim  # each sees itself alone
    floor = Floor(config, jnp.float32, Rates(bytes=float("inf"), operations=1.0)).step([Chunk(0)] * 3)
    assert sum(2 * rows * size * out for rows, size, out in shapes) == floor - attention


SMALL = {
    "throughput": "--dtypes float32 --sequences 2 --new-tokens 4 --rounds 1",
    "decode": "--sequences 2 --contexts 8 --rounds 1 --page-size 8",
    "prefill": "--chunks 8 --cached 8 --rounds 1 --page-size 8",
    "contiguous": "--dtypes float32 --sequences 2 --contexts 8 --max-model-len 16 --rounds 1",
    "memory": "--budget-mib 1 --requests 4 --shrink 64 --max-seqs 4 --rounds 1",
    "page-size": "--requests 3 --shrink 64 --max-seqs 2 --rounds 1 --sizes 8 16",
    "floor": "--dtypes float32",
    "overhead": "--sequences 2 --steps 5",
    "parts": "--sequences 2 --new-tokens 8 --rounds 1",
    "compile": "--sequences 2",
    "perplexity": "--dtypes float32 --kv-dtypes float32",
}


DEFAULT = ("overhead",)


@pytest.mark.parametrize(
    "command", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in benchmark.COMMANDS]
)
def test_commands(command, model_path, tmp_path, capsys):
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    model = [] if command == "overhead" else ["--model", model_path]
    extra = ["--plot", str(picture)] if command == "decode" else []
    assert benchmark.main([command, *model, *SMALL[command].split(), "--json", str(results), *extra]) == 0
    written = json.loads(results.read_text())
    assert written["command"] == f"benchmark {command}"
    out = capsys.readouterr().out
    assert all(name in out for name in written["rows"][0])
    assert picture.exists() == (command == "decode")
    if command == "compile":
        assert written["rows"][0]["programs"] > 0
        assert written["rows"][0]["compiled while serving"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--contexts", "0"], "--contexts must be at least 1, got [0]"),
        (["decode", "--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
        (["parts", "--json", "no/such/out.json"], "cannot write no/such/out.json"),
        (["fly"], "argument command: invalid choice: 'fly'"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    status = benchmark.main(arguments)
    assert_refused((status, *capsys.readouterr()), message)
