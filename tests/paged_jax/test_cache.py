"""The cache by small examples: what each sequence holds after forks, reorders, cuts and writes; memory wasted."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.typing import DTypeLike

import paged_jax
from paged_jax import Batch, KVLayout, KVPages, PageCopies, PagedCache, copy_pages, gather_kv
from tests.paged_jax.model_cache import bits, check_all_free, check_pool, i32, mask, on_host, poisoned_cache

LAYOUT = KVLayout(2, 16, 4, num_kv_heads=2, head_dim=2, padded_head_dim=3)
NUM_TOKENS = 12

append = jax.jit(partial(paged_jax.append, num_tokens=NUM_TOKENS))
append_decode = jax.jit(paged_jax.append_decode)
fork = jax.jit(paged_jax.fork)
reorder = jax.jit(paged_jax.reorder)
truncate = jax.jit(paged_jax.truncate)
release = jax.jit(paged_jax.release)


@jax.jit
def write(cache: PagedCache, batch: Batch, tokens: Array) -> PagedCache:
    """A token t has keys of 10 t + layer and values of -(10 t + layer)."""
    kv = cache.kv
    for layer in range(cache.layout.num_layers):
        k = jnp.broadcast_to(10 * tokens[:, None, None] + layer, (tokens.shape[0], 2, 2)).astype(jnp.float32)
        kv = paged_jax.write_kv(kv, k, -k, batch, layer=layer)
    return replace(cache, kv=kv)


def start(*sequences: Sequence[int], dtype: DTypeLike = LAYOUT.dtype) -> PagedCache:
    """Four rows, the first of which hold the tokens given."""
    cache = poisoned_cache(replace(LAYOUT, dtype=dtype), max_seqs=4, pages_per_seq=15)
    return extend(cache, *sequences)


def extend(cache: PagedCache, *sequences: Sequence[int]) -> PagedCache:
    """Appends tokens to the first rows."""
    cache, batch, ok = append(cache, i32(*map(len, sequences), *[0] * (4 - len(sequences))))
    assert ok
    tokens = [token for sequence in sequences for token in sequence]
    return write(cache, batch, i32(*tokens, *[0] * (NUM_TOKENS - len(tokens))))


def decode(cache: PagedCache, *tokens: int) -> PagedCache:
    """Appends one token to every row whose token is not 0."""
    cache, batch, ok = append_decode(cache, mask(*tokens))
    assert ok
    return write(cache, batch, i32(*tokens))


gather = on_host(gather_kv, ["layer"])
on_usage = on_host(paged_jax.usage)


def tokens_of(cache: PagedCache) -> list[list[int]]:
    """The tokens of every row, the same in all layers, heads, keys and values."""
    check_pool(cache.pool, cache.tables, page_size=LAYOUT.page_size)
    lens = cache.tables.seq_lens.tolist()
    layers = []
    for layer in range(LAYOUT.num_layers):
        k, v = gather(cache, layer=layer)
        np.testing.assert_array_equal(k, np.broadcast_to(k[..., :1, :1], k.shape))
        np.testing.assert_array_equal(v, -k)
        for row, n in enumerate(lens):
            assert not k[row, n:].any()
        layers.append([((k[row, :n, 0, 0] - layer) / 10).round().astype(int).tolist() for row, n in enumerate(lens)])
    assert layers[0] == layers[1]
    return layers[0]


def test_appended_tokens_are_found_again() -> None:
    cache = extend(start([1, 2, 3, 4, 5], [6]), [7], [], [8, 9])
    assert tokens_of(cache) == [[1, 2, 3, 4, 5, 7], [6], [8, 9], []]
    assert tokens_of(decode(cache, 10, 0, 11, 12)) == [[1, 2, 3, 4, 5, 7, 10], [6], [8, 9, 11], [12]]


def test_forked_sequences_part_when_they_are_written() -> None:
    cache = fork(start([1, 2, 3, 4, 5, 6]), i32(0, 0), i32(1, 2))
    assert tokens_of(cache) == [[1, 2, 3, 4, 5, 6]] * 3 + [[]]
    cache = decode(cache, 7, 8, 9, 0)
    assert tokens_of(cache) == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9], []]
    page_ids = np.asarray(cache.tables.page_ids)
    assert page_ids[0, 0] == page_ids[1, 0] == page_ids[2, 0], "the full page stays shared"
    assert len(set(page_ids[:3, 1].tolist())) == 3


def test_scales_go_where_their_pages_go() -> None:
    """A token's numbers differ from the next one's by their scale alone: written, copied on write, gathered."""
    cache = decode(fork(start([1, 2, 3, 4, 5, 6], dtype=jnp.int8), i32(0, 0), i32(1, 2)), 7, 800, 9, 0)
    assert tokens_of(cache) == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 800], [1, 2, 3, 4, 5, 6, 9], []]
    assert cache.kv.pages.dtype == jnp.int8
    assert gather(cache, layer=0)[0].dtype == np.float32


def test_a_fork_that_rests_keeps_its_tokens() -> None:
    cache = fork(start([1, 2]), i32(0, 0), i32(1, -1))
    assert tokens_of(decode(cache, 3, 0, 0, 0)) == [[1, 2, 3], [1, 2], [], []]
    assert tokens_of(decode(cache, 0, 3, 0, 0)) == [[1, 2], [1, 2, 3], [], []]


def test_a_long_append_copies_the_shared_page_first() -> None:
    cache = extend(fork(start([1, 2]), i32(0, 0), i32(1, -1)), [3, 4, 5], [6, 7, 8, 9])
    assert tokens_of(cache) == [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8, 9], [], []]


def test_a_beam_search_step() -> None:
    cache = reorder(start([1], [2, 3], [4]), i32(1, 1, 0, 3))
    assert tokens_of(cache) == [[2, 3], [2, 3], [1], []]
    assert tokens_of(decode(cache, 5, 6, 7, 0)) == [[2, 3, 5], [2, 3, 6], [1, 7], []]


def test_truncate_then_append_does_not_touch_the_fork() -> None:
    cache = truncate(fork(start([1, 2, 3, 4, 5, 6]), i32(0, 0), i32(1, -1)), i32(3, 9, 9, 9))
    assert tokens_of(cache) == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [], []]
    assert tokens_of(decode(cache, 7, 0, 0, 0)) == [[1, 2, 3, 7], [1, 2, 3, 4, 5, 6], [], []]
    assert tokens_of(decode(cache, 7, 8, 0, 0)) == [[1, 2, 3, 7], [1, 2, 3, 4, 5, 6, 8], [], []]


def test_release_twice_and_begin_again() -> None:
    cache = release(fork(start([1, 2], [3]), i32(0, 0), i32(2, -1)), mask(1, 0, 0, 0))
    cache = release(cache, mask(1, 0, 0, 0))
    assert tokens_of(cache) == [[], [3], [1, 2], []]
    assert tokens_of(decode(cache, 4, 5, 6, 0)) == [[4], [3, 5], [1, 2, 6], []]
    check_all_free(release(cache, mask(1, 1, 1, 1)).pool)


def test_a_refused_step_leaves_every_byte_of_the_cache() -> None:
    cache = fork(start([1, 2, 3], [4, 5]), i32(0, 0), i32(2, -1))
    after, batch, ok = append(cache, i32(1, 12, 0, 0))
    assert not ok
    after = write(after, batch, i32(*[99] * NUM_TOKENS))
    assert tokens_of(after) == tokens_of(cache)
    np.testing.assert_array_equal(bits(after.kv.pages), bits(cache.kv.pages))
    for old, new in zip((*cache.pool, *cache.tables), (*after.pool, *after.tables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_copy_pages_copies_all_layers_of_the_listed_pages_only() -> None:
    layout = KVLayout(3, 6, 2, num_kv_heads=1, head_dim=1)
    pages = jnp.arange(np.prod(layout.pages_shape), dtype=jnp.float32).reshape(layout.pages_shape)
    copies = PageCopies(src=i32(1, 4, 2), dst=i32(5, 3, 0), count=jnp.int32(2))  # the third is not to be done
    expected = np.array(pages).reshape(3, 6, 2, 2)
    expected[:, 5], expected[:, 3] = expected[:, 1], expected[:, 4]
    copied = copy_pages(KVPages(pages, layout), copies)
    np.testing.assert_array_equal(copied.pages, expected.reshape(layout.pages_shape))
    assert copied.scales is None
    quantised = KVPages(pages.astype(jnp.int8), replace(layout, dtype=jnp.int8), jnp.moveaxis(pages, 1, 2))
    copied = copy_pages(quantised, copies)
    np.testing.assert_array_equal(copied.pages, expected.reshape(layout.pages_shape))
    np.testing.assert_array_equal(copied.scales, np.moveaxis(expected.reshape(layout.pages_shape), 1, 2))


def test_copy_pages_compiles_once_outside_jit() -> None:
    layout = KVLayout(1, 7, 2, num_kv_heads=1, head_dim=1)  # a shape of its own
    kv, before = KVPages.create(layout), copy_pages._cache_size()
    for _ in range(3):
        kv = copy_pages(kv, PageCopies(src=i32(1), dst=i32(2), count=jnp.int32(1)))
    assert copy_pages._cache_size() == before + 1


def test_gather_kv_shows_zeros_past_the_end_in_the_dtype_of_the_pool() -> None:
    layout = replace(LAYOUT, dtype=jnp.bfloat16)
    k, v = gather_kv(poisoned_cache(layout, max_seqs=2, pages_per_seq=3), layer=1)
    assert k.shape == v.shape == (2, 12, 2, 2)
    assert k.dtype == v.dtype == jnp.bfloat16
    assert not k.any()
    assert not v.any()


def test_usage_counts_shared_slots_once() -> None:
    cache = fork(start([1, 2, 3, 4, 5], [6]), i32(0, 0), i32(2, -1))
    assert on_usage(cache) == {"live": 3, "free": 12, "tokens": 11, "internal_waste": 6}


def test_waste_is_less_than_a_page_a_sequence_and_never_external() -> None:
    """No page is lost to fragmentation: after any history, one sequence can take every free page."""
    rng = np.random.default_rng(0)
    cache, wasted = start(), []
    for step in range(60):
        cache, _, _ = append(cache, rng.integers(0, 4, 4, np.int32))
        cache = fork(cache, rng.integers(0, 4, 2, np.int32), rng.permutation(4)[:2].astype(np.int32))
        cache = truncate(cache, np.asarray(cache.tables.seq_lens) - rng.integers(0, 4, 4, np.int32))
        cache = release(cache, rng.random(4) < 0.1)
        usage = on_usage(cache)
        assert usage["live"] + usage["free"] == LAYOUT.num_pages - 1
        sequences = np.count_nonzero(np.asarray(cache.tables.seq_lens))
        assert 0 <= usage["internal_waste"] <= (LAYOUT.page_size - 1) * sequences
        wasted.append(usage["internal_waste"])
        if step % 6 == 0:
            full = release(cache, mask(1, 0, 0, 0))
            for _ in range(int(full.pool.num_free)):
                full, _, ok = append(full, i32(LAYOUT.page_size, 0, 0, 0))
                assert ok
            check_pool(full.pool, full.tables, page_size=LAYOUT.page_size)
            assert int(full.pool.num_free) == 0
    assert max(wasted) > 0


def test_a_search_in_a_while_loop() -> None:
    """The whole cache as the carry of a loop: forks, appends and releases keep every dtype, in x64 mode too."""

    def body(carry: tuple[Array, PagedCache]) -> tuple[Array, PagedCache]:
        step, cache = carry
        cache, batch, _ = paged_jax.append_decode(cache, jnp.ones(4, bool))
        cache = write(cache, batch, jnp.full(4, step, jnp.int32))
        cache = paged_jax.reorder(cache, jnp.roll(jnp.arange(4, dtype=jnp.int32), 1))
        cache = paged_jax.fork(cache, i32(0), i32(1))
        cache, batch, _ = paged_jax.append(cache, jnp.arange(4, dtype=jnp.int32) % 2, num_tokens=3)
        cache = write(cache, batch, jnp.full(3, step, jnp.int32))
        cache = paged_jax.truncate(cache, jnp.minimum(cache.tables.seq_lens, 8))
        return step + 1, paged_jax.release(cache, jnp.arange(4, dtype=jnp.int32) == step % 8)

    _, cache = lax.while_loop(lambda carry: carry[0] < 50, body, (jnp.int32(1), start()))
    assert {leaf.dtype for leaf in (*cache.pool, *cache.tables)} == {jnp.dtype(jnp.int32)}
    assert any(tokens_of(cache))
    check_all_free(release(cache, mask(1, 1, 1, 1)).pool)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_seqs": 0, "pages_per_seq": 1}, "max_seqs must be at least 1, got 0"),
        ({"max_seqs": 1, "pages_per_seq": 0}, "pages_per_seq must be at least 1, got 0"),
    ],
)
def test_create_refuses(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache.create(LAYOUT, **sizes)


def test_heads_that_do_not_fit_the_layout_are_refused() -> None:
    cache = start([1])
    _, batch, _ = append(cache, i32(1, 0, 0, 0))
    k = jnp.zeros((NUM_TOKENS, 2, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"k must be \[num_tokens, 2, 2\] as in the layout, got \[12, 2, 3\]"):
        paged_jax.write_kv(cache.kv, k, k, batch, layer=0)
    with pytest.raises(ValueError, match="q's head_dim must be 2 as in the layout, got 3"):
        paged_jax.attend(k, cache.kv, batch, layer=0)


def test_x64_mode_is_the_one_asked_for() -> None:
    """test_x64 runs this file once more; here it is seen that the mode was on."""
    assert (jnp.arange(2).dtype == jnp.int64) == (os.environ.get("JAX_ENABLE_X64") == "1")
