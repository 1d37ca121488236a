"""KV heads over four devices; test_sharding.py runs this in a process that has them."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax as pj
from models.config import TransformerConfig
from models.transformer import FunctionalModel, functional, random_params
from paged_jax import sharding
from scripts.kernels.cases import Case, Inputs, build, check, operands, oracle, same_bytes
from tests.paged_jax.collectives import collectives, moved_pages
from tests.paged_jax.model_cache import i32, mask, poisoned_cache

MESH = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
REPLICATED = NamedSharding(MESH, P())

CASES = {
    "mixed": Case(
        query_lens=(5, 1, 0, 1), seq_lens=(9, 17, 4, 0), num_heads=8, num_kv_heads=4, num_layers=2, layer=1,
        sliding_window=6, padding_seqs=1, padding_rows=1, max_query_len=8,
    ),
    "decode of int8": Case(
        query_lens=(1, 1, 1), seq_lens=(1, 37, 8), num_heads=24, num_kv_heads=8, kv_dtype="int8", dtype="bfloat16",
        logit_soft_cap=2.0,
    ),
}  # fmt: skip


def step_of(case: Case, inputs: Inputs) -> tuple[pj.KVPages, tuple[Any, ...]]:
    """The pages on one device, and (q, k, v, batch): a step that writes its first token into a page of nobody."""
    q, pages, tables, seq_lens, cu_query_lens = operands(inputs)
    num_pages = pages.shape[0] // case.num_layers
    layout = pj.KVLayout(
        case.num_layers, num_pages, case.page_size, case.num_kv_heads, case.head_dim, dtype=pages.dtype
    )
    used = {page for row, count in zip(inputs.block_tables, case.pages_needed, strict=False) for page in row[:count]}
    slots = np.full(q.shape[0], -1, np.int32)
    slots[0] = next(page for page in range(1, num_pages) if page not in used) * case.page_size + 1
    longest = case.max_query_len or max(case.query_lens)
    batch = pj.Batch(tables, seq_lens, cu_query_lens, slots, jnp.asarray(slots), seq_lens, longest)
    k, v = np.random.default_rng(1).standard_normal((2, q.shape[0], case.num_kv_heads, case.head_dim))
    scales = None if inputs.kv_scales is None else jnp.asarray(inputs.kv_scales)
    return pj.KVPages(pages, layout, scales), (q, k.astype(q.dtype), v.astype(q.dtype), batch)


@pytest.mark.parametrize("name", CASES)
def test_contract(name: str) -> None:
    """Right by the oracle on poisoned pages, no bit of the poison in the result, written as by one device, and no
    traffic at all."""
    case = CASES[name]
    attention = partial(sharding.attention(MESH, "heads"), logit_soft_cap=case.logit_soft_cap)
    options = {
        "layer": jnp.int32(case.layer),
        "scale": jnp.float32(case.scale),
        "sliding_window": jnp.int32(case.sliding_window),
    }
    program, outs = None, []
    for poison in (True, False):
        inputs = build(case, poison=poison)
        kv, (q, k, v, batch) = step_of(case, inputs)
        arguments = q, k, v, jax.device_put(kv, sharding.shardings(kv.layout, MESH, "heads")), batch
        program = program or jax.jit(attention).lower(*arguments, **options).compile()
        out, after = program(*arguments, **options)
        outs.append(np.asarray(out))
        if poison:
            written = jax.jit(partial(pj.write_kv, layer=case.layer))(kv, k, v, batch)
            for got, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(written), strict=True):
                assert same_bytes(np.asarray(got), np.asarray(wanted))
            expected = oracle(case, inputs)
            check(case, expected, outs[0], expected.lse.astype(np.float32), "four devices")  # attend gives no lse
    assert not collectives(program.as_text())
    assert same_bytes(*outs)


CONFIG = TransformerConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
    max_model_len=64,
)  # fmt: skip
LAYOUT = pj.KVLayout(CONFIG.num_layers, 37, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
ROWS = CONFIG.num_layers * LAYOUT.num_pages  # 74, an axis of nothing but the pages and their scales
TOLERANCE = 2e-5
"""Relative to the largest logit: two float32 forwards of 2 layers, sums of 48 at most, some 200 roundings in a row."""


def decode(
    model: FunctionalModel, params: Any, cache: pj.PagedCache, token_ids: Array, active: Array
) -> tuple[pj.PagedCache, Array]:
    """A token of each active row, with copy-on-write."""
    cache, batch, _ = pj.append_decode(cache, active)
    hidden, kv = model(params, token_ids, batch, cache.kv)
    return replace(cache, kv=kv), model.logits(params, hidden)


def run(model: FunctionalModel, params: Any, cache: pj.PagedCache) -> tuple[np.ndarray, pj.PagedCache, str]:
    """Logits of steps that come to lengths about a page's edge, a fork between them; the cache and the program."""
    rng = np.random.default_rng(7)
    place = jax.tree.leaves(cache.tables)[0].sharding
    step, logits = None, []
    for i in range(9):
        token_ids = rng.integers(0, CONFIG.vocab_size, 4, np.int32)
        active = mask(1, i > 1, i % 2, i > 6)
        if i == 7:
            cache = jax.jit(pj.fork)(cache, *jax.device_put((i32(0), i32(3)), place))
        arguments = params, cache, *jax.device_put((token_ids, active), place)
        step = step or jax.jit(partial(decode, model), donate_argnums=1).lower(*arguments).compile()
        cache, out = step(*arguments)
        logits.append(np.asarray(out)[np.asarray(active)])
    return np.concatenate(logits), cache, step.as_text()


def over_the_mesh(cache: pj.PagedCache) -> pj.PagedCache:
    kv = jax.device_put(cache.kv, sharding.shardings(cache.layout, MESH, "heads"))
    return replace(jax.device_put(replace(cache, kv=None), REPLICATED), kv=kv)


def test_a_model_decodes_as_on_one_device() -> None:
    """Decode, a fork and copy-on-write: logits and pages are one device's, and no page leaves its device."""
    params = random_params(CONFIG, seed=3)
    expected, alone, _ = run(functional(CONFIG), params, poisoned_cache(LAYOUT, max_seqs=4, pages_per_seq=6))
    empty = poisoned_cache(LAYOUT, max_seqs=4, pages_per_seq=6)  # the other one was donated
    model = functional(CONFIG, attention=sharding.attention(MESH, "heads"))
    logits, cache, program = run(model, jax.device_put(params, REPLICATED), over_the_mesh(empty))
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    pages, expected = np.asarray(cache.kv.pages), np.asarray(alone.kv.pages)
    np.testing.assert_allclose(pages, expected, rtol=0, atol=TOLERANCE * np.nanmax(expected))  # NaN where nobody wrote
    assert collectives(program), "a model whose weights are everywhere gathers at least the heads' outputs"
    assert not moved_pages(program, ROWS)
    assert [shard.data.shape for shard in cache.kv.pages.addressable_shards] == [(ROWS, 4, 16)] * 4


def test_the_check_finds_pages_that_move() -> None:
    kv = sharding.create(LAYOUT, MESH, "heads")
    gather = jax.jit(lambda kv: kv.pages + 1, out_shardings=REPLICATED)
    assert moved_pages(gather.lower(kv).compile().as_text(), ROWS)


def test_created_pages_are_spread() -> None:
    kv = sharding.create(replace(LAYOUT, dtype=jnp.int8), MESH, "heads")
    assert [shard.data.shape for shard in kv.pages.addressable_shards] == [(ROWS, 4, 16)] * 4
    assert [shard.data.shape for shard in kv.scales.addressable_shards] == [(ROWS, 2, 4)] * 4
    assert not any(map(jnp.any, jax.tree.leaves(kv)))
