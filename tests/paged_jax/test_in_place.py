"""The pages are updated in place, whatever their number; a dropped token changes no byte of them."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import paged_jax
from paged_jax import Batch, KVLayout, KVPages, PagedCache, steps
from tests.paged_jax.model_cache import bits, i32

MAX_SEQS = 4
NUM_HEADS = 4


def layout(num_pages: int, page_size: int = 4, head_dim: int = 16) -> KVLayout:
    return KVLayout(2, num_pages, page_size, num_kv_heads=2, head_dim=head_dim)


def layers(kv: KVPages, batch: Batch, x: Array) -> tuple[KVPages, Array]:
    """What a model's layers do with the pages."""
    for layer in range(kv.layout.num_layers):
        kv = paged_jax.write_kv(kv, x[:, :2], x[:, :2], batch, layer=layer)
        x = x + paged_jax.attend(x, kv, batch, layer=layer)
    return kv, x


def beam_step(cache: PagedCache, x: Array, parents: Array) -> tuple[PagedCache, Array]:
    """Reorder, append with copy-on-write, write, attend; begins anew when the rows are full."""
    full = (cache.tables.seq_lens == cache.layout.page_size * cache.tables.page_ids.shape[1]).any()
    cache = paged_jax.release(cache, jnp.broadcast_to(full, MAX_SEQS))
    cache = paged_jax.reorder(cache, parents)
    cache, batch, _ = paged_jax.append_decode(cache, jnp.ones(MAX_SEQS, bool))
    kv, x = layers(cache.kv, batch, x)
    return replace(cache, kv=kv), x


def fori(cache: PagedCache, x: Array, parents: Array) -> tuple[PagedCache, Array]:
    return lax.fori_loop(0, 5, lambda _, carry: beam_step(*carry, parents), (cache, x))


def arguments(layout: KVLayout) -> tuple[PagedCache, Array, Array]:
    cache = PagedCache.create(layout, max_seqs=MAX_SEQS, pages_per_seq=6)
    return cache, jnp.ones((MAX_SEQS, NUM_HEADS, layout.head_dim), jnp.float32), i32(1, 1, 0, 3)


def compiled(
    function: Callable[..., tuple[PagedCache, Array]], layout: KVLayout, donate: tuple[int, ...] = (0,)
) -> jax.stages.Compiled:
    shapes = jax.eval_shape(lambda: arguments(layout))
    return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def pool_copies(program: jax.stages.Compiled, layout: KVLayout) -> list[str]:
    """Instructions that copy the pool or select between two."""
    shape = re.escape(f"f32[{','.join(map(str, layout.pages_shape))}]")
    pattern = rf"^.*= \(?{shape}\S* (?:copy|copy-start|select|concatenate|pad)\(.*$"
    return re.findall(pattern, program.as_text(), re.MULTILINE)


@pytest.mark.parametrize("function", [fori, beam_step])
def test_the_pool_is_updated_in_place(function: Callable[..., tuple[PagedCache, Array]]) -> None:
    """Temporary memory does not grow with the pages, but by the metadata's int32 per page."""
    small, large = layout(64), layout(1024)
    programs = [compiled(function, size) for size in (small, large)]
    memory = [program.memory_analysis() for program in programs]
    for program, size, used in zip(programs, (small, large), memory, strict=True):
        assert not pool_copies(program, size)
        assert used.alias_size_in_bytes >= size.pool_bytes, "the donated pool is not the result's"
    grown = memory[1].temp_size_in_bytes - memory[0].temp_size_in_bytes
    arrays = 16  # of the pool's metadata (references, who writes, what is freed, ...) alive at one time, at most
    assert grown <= arrays * 4 * (large.num_pages - small.num_pages)
    assert grown < 0.05 * (large.pool_bytes - small.pool_bytes)


class Layers:
    """A model that is its layers' attention alone."""

    def __call__(self, params: None, token_ids: Array, batch: Batch, kv: KVPages) -> tuple[Array, KVPages]:
        x = jnp.broadcast_to(token_ids[:, None, None].astype(jnp.float32), (MAX_SEQS, NUM_HEADS, kv.layout.head_dim))
        kv, x = layers(kv, batch, x)
        return x.reshape(MAX_SEQS, -1), kv

    def logits(self, params: None, hidden: Array) -> Array:
        return hidden


def test_the_engine_s_decode_steps_update_the_pool_in_place() -> None:
    """Several in one call: the pages are a carry of the loop."""
    memory = []
    config = paged_jax.EngineConfig(max_seqs=MAX_SEQS)
    for size in (layout(64), layout(1024)):
        decode = jax.jit(partial(steps._decode, Layers(), None, config, size.page_size), donate_argnums=3)
        kv = jax.eval_shape(partial(KVPages.create, size))
        program = decode.lower(None, *steps._decode_shapes(MAX_SEQS, 6), kv, steps.Extras()).compile()
        assert not pool_copies(program, size)
        memory.append(program.memory_analysis())
        assert memory[-1].alias_size_in_bytes >= size.pool_bytes, "the donated pool is not the result's"
    assert memory[0].temp_size_in_bytes == memory[1].temp_size_in_bytes


def test_page_functions_need_the_same_memory_whatever_the_pool() -> None:
    """The engine's program: metadata comes from elsewhere, so not even that grows."""

    def step(cache: PagedCache, x: Array, parents: Array) -> tuple[PagedCache, Array]:
        batch, copies = given
        kv, x = layers(paged_jax.copy_pages(cache.kv, copies), batch, x)
        return replace(cache, kv=kv), x

    cache, _, parents = arguments(layout(64))
    tables, pool, *_ = paged_jax.block_tables.append_decode(cache.tables, cache.pool, parents > 0, page_size=4)
    tables, pool = paged_jax.block_tables.reorder(tables, pool, parents)
    given = paged_jax.block_tables.append_decode(tables, pool, parents > 0, page_size=4)[2:4]
    sizes = [compiled(step, layout(n)).memory_analysis().temp_size_in_bytes for n in (64, 1024)]
    assert sizes[0] == sizes[1]


def test_the_check_finds_a_copied_pool() -> None:
    def wrong(cache: PagedCache, x: Array, parents: Array) -> tuple[PagedCache, Array]:
        after, x = beam_step(cache, x, parents)
        pages = jnp.where(x[0, 0, 0] > 0, after.kv.pages, cache.kv.pages)
        return replace(after, kv=replace(after.kv, pages=pages)), x

    size = layout(1024)
    assert compiled(wrong, size).memory_analysis().temp_size_in_bytes > size.pool_bytes / 2
    assert pool_copies(compiled(beam_step, size, donate=()), size), "without donation there must be a copy"


@pytest.mark.parametrize("megabytes", [(16, 256), pytest.param((64, 1024), marks=pytest.mark.slow)])
def test_a_step_takes_no_longer_in_a_larger_pool(megabytes: tuple[int, int]) -> None:
    """Pages of 256 KB, as a model of some layers has them: what the metadata takes, some 20 ns a page, is left out by
    having few of them."""
    page_bytes = layout(2, 64, 128).bytes_per_page
    step = jax.jit(beam_step, donate_argnums=0)
    states, times = [], []
    for size in megabytes:
        cache, x, parents = arguments(layout(size * 2**20 // page_bytes, 64, 128))
        assert size * 0.99 <= cache.layout.pool_bytes / 2**20 <= size
        for _ in range(3):
            cache, _ = step(cache, x, parents)
        states.append((cache, x, parents))
        times.append([])
    for _ in range(40):  # in turns, so that both see the same neighbours
        for i, (cache, x, parents) in enumerate(states):
            begin = time.perf_counter()
            cache, out = jax.block_until_ready(step(cache, x, parents))
            times[i].append(time.perf_counter() - begin)
            states[i] = (cache, x, parents)
            assert out.shape == x.shape
    small, large = map(statistics.median, times)
    assert large < 1.5 * small, f"{small * 1e3:.2f} ms with {megabytes[0]} MB, {large * 1e3:.2f} ms with {megabytes[1]}"


def poisoned(num_layers: int, dtype: jnp.dtype) -> KVPages:
    small = KVLayout(num_layers, 5, 3, num_kv_heads=2, head_dim=2, dtype=dtype)
    return KVPages(jnp.full(small.pages_shape, jnp.nan, dtype), small)


def batch_of(slots: Array) -> Batch:
    zeros = jnp.zeros_like(slots)
    return Batch(zeros[:, None], zeros, jnp.arange(slots.shape[0] + 1, dtype=jnp.int32), zeros, slots, zeros, 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("traced", [False, True], ids=["static layer", "traced layer"])
def test_a_dropped_token_changes_no_byte(dtype: jnp.dtype, traced: bool) -> None:
    """A slot of -1 neither wraps to the pool's end nor lands in the next layer, in any layer."""
    kv, batch, x = poisoned(3, dtype), batch_of(i32(-1, -1, -1, -1)), jnp.ones((4, 2, 2), dtype)
    if traced:

        def write(kv: KVPages, layer: Array) -> tuple[KVPages, None]:
            return paged_jax.write_kv(kv, x, x, batch, layer=layer), None

        after, _ = jax.jit(lambda kv: lax.scan(write, kv, jnp.arange(3, dtype=jnp.int32)))(kv)
    else:
        after = kv
        for layer in range(3):
            after = paged_jax.write_kv(after, x, x, batch, layer=layer)
    np.testing.assert_array_equal(bits(after.pages), bits(kv.pages))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_only_the_slots_of_the_layer_are_written(layer: int) -> None:
    """Also the pool's first and last slots, beside dropped tokens."""
    kv, batch = poisoned(3, jnp.float32), batch_of(i32(3, -1, 14, 7))
    k = jnp.arange(16, dtype=jnp.float32).reshape(4, 2, 2)
    after = np.asarray(paged_jax.write_kv(kv, k, 100 + k, batch, layer=layer).pages).reshape(3, 15, 2, 2, 2)
    expected = np.full_like(after, np.nan)
    for token, slot in ((0, 3), (2, 14), (3, 7)):
        expected[layer, slot, :, 0], expected[layer, slot, :, 1] = k[token], 100 + k[token]
    np.testing.assert_array_equal(after, expected)


def test_poison_in_slots_that_nobody_owns_does_not_reach_the_attention() -> None:
    """Bit for bit, with NaN or zeros in all slots past the sequences' ends and in all other pages."""
    outputs = []
    for poison in (jnp.nan, 0.0):
        cache, x, _ = arguments(layout(20))
        cache = replace(cache, kv=KVPages(jnp.full(cache.layout.pages_shape, poison), cache.layout))
        for step in range(6):
            cache, batch, ok = append_decode(cache, jnp.array([True, step < 3, step > 2, False]))
            assert ok
            kv, out = run_layers(cache.kv, batch, x * (step + 1))
            cache = replace(cache, kv=kv)
        outputs.append(np.asarray(out))
    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(outputs[0].view(np.int32), outputs[1].view(np.int32))


append_decode = jax.jit(paged_jax.append_decode)
run_layers = jax.jit(layers)
