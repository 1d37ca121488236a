"""Tiny checkpoints of every architecture, saved by transformers, against the logits that transformers recorded.

tests/data/record_tiny.py made them; its docstring says how. The sequences are longer than the windows, one of them
from the prompt on, the other while it decodes.
"""

import importlib.util
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models.transformer import functional
from models.weights import safetensors
from paged_jax import batch as batches

DATA = Path(__file__).parents[1] / "data" / "tiny"
LOGITS = dict(np.load(DATA / "logits.npz"))
PREFILLS = (40, 5)
NUM_DECODED = 20
PAGE_SIZE, CHUNK = 4, 11
TOLERANCE = 2e-5
"""Relative to the largest logit: about 250 float32 roundings of 2**-24 in a row (4 layers, reductions of 24 and
softmaxes over 60 keys) come to 1.5e-5."""


def token_ids():
    """As in record_tiny.py."""
    return [
        [3 + (7 * i * i + 11 * i + 5 * n) % 45 for i in range(prefill + NUM_DECODED)]
        for n, prefill in enumerate(PREFILLS)
    ]


@cache
def checkpoint(name):
    return safetensors.load(DATA / name)


ragged = jax.jit(partial(batches.ragged, page_size=PAGE_SIZE, num_tokens=2 * CHUNK, max_query_len=CHUNK))


def logits_of(config, params, *, implementation="reference", unroll_layers=False):
    """Logits of all tokens, as recorded: prompts in chunks, side by side, then token by token with the same program,
    out of shuffled pages that start as NaN."""
    model = functional(config, unroll_layers=unroll_layers)
    sequences = token_ids()
    layout = model.kv_layout(num_pages=33, page_size=PAGE_SIZE)
    tables = np.random.default_rng(0).permutation(np.arange(1, 33, dtype=np.int32)).reshape(2, 16)
    kv = pj.KVPages(jnp.asarray(np.full(layout.pages_shape, np.nan, np.float32)), layout)

    @partial(jax.jit, donate_argnums=1)
    def step(params, kv, batch, ids):
        hidden, kv = model(params, ids, batch, kv)
        return model.logits(params, hidden), kv

    done, rows = [0, 0], ([], [])
    while done[0] < len(sequences[0]):
        counts = [
            min(CHUNK, prefill - d) if d < prefill else int(d < len(ids))
            for d, prefill, ids in zip(done, PREFILLS, sequences, strict=True)
        ]
        batch = ragged(tables, np.array(done, np.int32), np.array(counts, np.int32))
        packed = np.concatenate([ids[d : d + c] for ids, d, c in zip(sequences, done, counts, strict=True)])
        ids = np.pad(packed, (0, 2 * CHUNK - len(packed))).astype(np.int32)
        logits, kv = step(params, kv, replace(batch, implementation=implementation), ids)
        logits = np.asarray(logits)
        rows[0].append(logits[: counts[0]])
        rows[1].append(logits[counts[0] : sum(counts)])
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return np.concatenate(rows[0] + rows[1])


def distance(got, name):
    """The largest difference, in units of the tolerance."""
    expected = LOGITS[name]
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / (TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("name", LOGITS)
def test_recorded_logits(name):
    """In a loop over the layers, as on a CPU. All that a compiled program costs is attention, so here it is the plain
    one."""
    assert distance(logits_of(*checkpoint(name)), name) < 1


@pytest.mark.parametrize(
    ("name", "unroll_layers"),
    [
        pytest.param(name, unroll, marks=() if (name, unroll) == ("gemma2", False) else pytest.mark.slow)
        for name in LOGITS
        for unroll in (False, True)
    ],
)
def test_recorded_logits_with_the_xla_implementation(name, unroll_layers):
    got = logits_of(*checkpoint(name), implementation="xla", unroll_layers=unroll_layers)
    assert distance(got, name) < 1


def test_recorded_logits_with_unrolled_layers():
    """Gemma 2's windows are then numbers, and absent in every other layer."""
    assert distance(logits_of(*checkpoint("gemma2"), unroll_layers=True), "gemma2") < 1


@pytest.mark.parametrize("name", LOGITS)
def test_bfloat16_stays_bfloat16(name):
    """Traced only, with strict promotion: no constant widens the residual stream, and the logits are float32."""
    config, params = checkpoint(name)
    model = functional(config, unroll_layers=False)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    layout = model.kv_layout(num_pages=3, dtype=jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2 * CHUNK,), jnp.int32)
    batch = ragged(np.zeros((2, 1), np.int32), np.zeros(2, np.int32), np.ones(2, np.int32))
    kv = jax.eval_shape(lambda: pj.KVPages.create(layout))
    hidden, _ = jax.eval_shape(model, params, ids, batch, kv)
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model.logits, params, hidden).dtype == jnp.float32


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LOGITS)
def test_live(name, tmp_path):
    """Other random weights, transformers running beside. Its own warnings are its own."""
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("transformers", reason="needs transformers")
    spec = importlib.util.spec_from_file_location("record_tiny", DATA.parent / "record_tiny.py")
    record_tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record_tiny)
    record_tiny.random_model(record_tiny.ARCHITECTURES[name], seed=100).save_pretrained(tmp_path)
    expected = record_tiny.record(record_tiny.load(tmp_path))
    got = logits_of(*safetensors.load(tmp_path), implementation="xla")
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
