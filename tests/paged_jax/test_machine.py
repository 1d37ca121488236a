"""Random operations against the plain-Python model, every invariant after every step; and long runs without leaks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jax import Array, lax

import paged_jax
from paged_jax import Batch, KVLayout, PagedCache, block_tables, page_pool
from tests.paged_jax.model_cache import (
    ModelCache,
    Tracker,
    check_all_free,
    check_pool,
    contents,
    expected_usage,
    gather_all,
    i32,
    keys_and_values,
    poisoned_cache,
)

MAX_SEQS = 4
PAGES_PER_SEQ = 4
NUM_PAGES = 8  # 7 to allocate: one full sequence fits, two do not, so that pages run out often
NUM_TOKENS = 8


def layout_of(page_size: int) -> KVLayout:
    padded = 3 if page_size % 2 else 2
    return KVLayout(2, NUM_PAGES, page_size, num_kv_heads=2, head_dim=2, padded_head_dim=padded)


Grown = tuple[PagedCache, Batch, Array]


def write_all(cache: PagedCache, batch: Batch, kv: Array) -> PagedCache:
    """Writes keys and values [2, num_layers, num_tokens, num_kv_heads, head_dim] of a step, layer by layer."""
    pages = cache.kv
    for layer in range(cache.layout.num_layers):
        pages = paged_jax.write_kv(pages, kv[0, layer], kv[1, layer], batch, layer=layer)
    return replace(cache, kv=pages)


def append(cache: PagedCache, counts: Array) -> Grown:
    return paged_jax.append(cache, counts, num_tokens=NUM_TOKENS)


def hold(cache: PagedCache, page_id: Array) -> PagedCache:
    return replace(cache, pool=page_pool.retain(cache.pool, page_id))


def drop(cache: PagedCache, page_id: Array) -> PagedCache:
    return replace(cache, pool=page_pool.release(cache.pool, page_id))


FUNCTIONS = (
    append, write_all, hold, drop, paged_jax.append_decode,
    paged_jax.fork, paged_jax.reorder, paged_jax.truncate, paged_jax.release,
)  # fmt: skip
JITTED: dict[Callable[..., Any], Callable[..., Any]] = {function: jax.jit(function) for function in FUNCTIONS}


@jax.jit
def look(cache: PagedCache) -> tuple[Any, ...]:
    return cache.pool, cache.tables, cache.kv.pages, paged_jax.usage(cache), gather_all(cache)


rows = st.integers(0, MAX_SEQS - 1)
flags = st.lists(st.booleans(), min_size=MAX_SEQS, max_size=MAX_SEQS)


def per_row(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=MAX_SEQS, max_size=MAX_SEQS)


class CacheMachine(RuleBasedStateMachine):
    """Drives a PagedCache and the model side by side; every token is written with a number of its own."""

    wrap: ClassVar[Callable[[Callable[..., Any]], Callable[..., Any]]] = staticmethod(JITTED.__getitem__)
    page_size: ClassVar[int] = 0  # any
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(page_size=st.integers(1, 5), seed=st.integers(0, 99))
    def start(self, page_size: int, seed: int) -> None:
        self.layout = layout_of(self.page_size or page_size)
        self.cache = poisoned_cache(self.layout, max_seqs=MAX_SEQS, pages_per_seq=PAGES_PER_SEQ, seed=seed)
        self.model = ModelCache(MAX_SEQS, PAGES_PER_SEQ, NUM_PAGES, self.layout.page_size)
        self.expected_pages = np.array(self.cache.kv.pages)
        self.tracker = Tracker()
        self.next_token = 1
        self.written: tuple[Batch, list[list[int]]] | None = None  # the last step, while it may be written again

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return type(self).wrap(function)(self.cache, *args)

    def new_tokens(self, counts: list[int]) -> list[list[int]]:
        tokens = []
        for n in counts:
            tokens.append(list(range(self.next_token, self.next_token + n)))
            self.next_token += n
        return tokens

    def write(self, batch: Batch, places: list[int], copied: dict[int, int] | None = None) -> None:
        """Writes the tokens that `places` puts into the packed batch; 0, for padding, writes NaN. Nothing but their
        slots, and the pages that are copies, changes in the whole pool."""
        expected = self.expected_pages
        by_layer = expected.reshape(self.layout.num_layers, NUM_PAGES, *expected.shape[1:])
        for destination, source in (copied or {}).items():
            by_layer[:, destination] = by_layer[:, source]
        kv = keys_and_values(places, self.layout)
        for i, slot in enumerate(batch.slot_mapping.tolist()):
            if slot >= 0:
                by_layer[:, slot // self.layout.page_size, slot % self.layout.page_size] = self.lanes(kv[:, :, i])
        self.cache = self.call(write_all, batch, jnp.asarray(kv))

    def lanes(self, kv: np.ndarray) -> np.ndarray:
        """[2, num_layers, num_kv_heads, head_dim] as a slot holds it: each head's key and then its value."""
        padding = self.layout.padded_head_dim - self.layout.head_dim
        wide = np.pad(kv, [(0, 0)] * 3 + [(0, padding)])
        return wide.transpose(1, 2, 0, 3).reshape(self.layout.num_layers, -1)

    def step(self, grown: Grown, counts: list[int], refusal: str | None) -> None:
        before, (cache, batch, ok) = self.cache, grown
        self.cache, self.written = cache, None
        tables, ok, told = jax.device_get((cache.tables, ok, batch))
        places = [0] * len(told.positions)
        self.seen[refusal or "done"] += 1
        assert bool(ok) == (refusal is None), refusal
        if refusal is not None:
            for old, new in zip((*before.pool, *before.tables), (*cache.pool, *cache.tables), strict=True):
                np.testing.assert_array_equal(old, new)
            assert (told.slot_mapping == -1).all()
            assert not told.seq_lens.any()
            self.write(batch, places)
            return

        copiers, old_lens = self.model.copiers(counts), list(map(len, self.model.tokens))
        copied = {}
        for row in copiers:
            new_id = int(tables.page_ids[row, old_lens[row] // self.layout.page_size])
            copied[new_id] = self.tracker.ids[self.model.pages[row][-1]]
        self.seen["copies"] += len(copied)
        new = self.new_tokens(counts)
        self.model.append(new)

        ends = list(range(1, MAX_SEQS + 1)) if told.max_query_len == 1 else np.cumsum(counts).tolist()
        slots, positions = [-1] * len(places), [0] * len(places)
        for row, tokens in enumerate(new):
            start = ends[row] - len(tokens)
            for i, token in enumerate(tokens):
                page, offset = divmod(old_lens[row] + i, self.layout.page_size)
                positions[start + i] = old_lens[row] + i
                slots[start + i] = int(tables.page_ids[row, page]) * self.layout.page_size + offset
                places[start + i] = token
        writes = [n > 0 for n in counts]
        assert told.slot_mapping.tolist() == slots
        assert told.positions.tolist() == positions
        assert told.cu_query_lens.tolist() == [0, *ends]
        assert told.seq_lens.tolist() == [(old + n) * (n > 0) for old, n in zip(old_lens, counts, strict=True)]
        assert told.logit_rows[writes].tolist() == [end - 1 for end, yes in zip(ends, writes, strict=True) if yes]
        np.testing.assert_array_equal(told.block_tables, tables.page_ids)
        self.write(batch, places, copied)
        self.written = (batch, new)

    @rule(counts=per_row(0, 2) | per_row(0, 2) | per_row(0, 4) | per_row(-1, NUM_TOKENS + 1))
    def append(self, counts: list[int]) -> None:
        refusal = self.model.refusal(counts, num_tokens=NUM_TOKENS, longest=NUM_TOKENS)
        self.step(self.call(append, i32(*counts)), counts, refusal)

    @rule(active=flags)
    def append_decode(self, active: list[bool]) -> None:
        counts = list(map(int, active))
        refusal = self.model.refusal(counts, num_tokens=MAX_SEQS, longest=1)
        self.step(self.call(paged_jax.append_decode, jnp.array(active)), counts, refusal)

    @precondition(lambda self: self.written is not None)
    @rule()
    def write_again(self) -> None:
        """A step may be written twice; nobody but its own sequences sees that."""
        assert self.written is not None
        batch, old = self.written
        new = self.new_tokens([len(tokens) for tokens in old])
        places = [0] * batch.positions.shape[0]
        for row, tokens in enumerate(new):
            if tokens:
                self.model.tokens[row][-len(tokens) :] = tokens
                end = int(batch.cu_query_lens[row + 1])
                places[end - len(tokens) : end] = tokens
        self.written = (batch, new)
        self.write(batch, places)

    @rule(src=st.lists(rows, min_size=2, max_size=2), dst=st.lists(rows, min_size=2, max_size=2, unique=True), n=rows)
    def fork(self, src: list[int], dst: list[int], n: int) -> None:
        dst = [d if i < max(n, 1) else -1 for i, d in enumerate(dst)]
        self.cache, self.written = self.call(paged_jax.fork, i32(*src), i32(*dst)), None
        self.model.fork(src, dst)

    @rule(parents=per_row(0, MAX_SEQS - 1))
    def reorder(self, parents: list[int]) -> None:
        self.cache, self.written = self.call(paged_jax.reorder, i32(*parents)), None
        self.model.reorder(parents)

    @rule(cuts=per_row(0, 2))
    def truncate(self, cuts: list[int]) -> None:
        lens = [len(tokens) - cut for tokens, cut in zip(self.model.tokens, cuts, strict=True)]
        self.cache, self.written = self.call(paged_jax.truncate, i32(*lens)), None
        self.model.truncate(lens)

    @rule(row=rows, gone=flags)
    def release(self, row: int, gone: list[bool]) -> None:
        gone = [flag and other <= row for other, flag in enumerate(gone)]
        self.cache, self.written = self.call(paged_jax.release, jnp.array(gone)), None
        self.model.release(gone)

    @rule(row=rows)
    def hold(self, row: int) -> None:
        """Something beside the tables refers to a row's last page, as a prefix index would."""
        if self.model.pages[row] and len(self.model.held) < 3:
            name = self.model.pages[row][-1]
            self.cache, self.written = self.call(hold, i32(self.tracker.ids[name])), None
            self.model.held.append(name)

    @precondition(lambda self: self.model.held)
    @rule()
    def drop(self) -> None:
        name = self.model.held.pop(0)
        self.cache, self.written = self.call(drop, i32(self.tracker.ids[name])), None

    @invariant()
    def agrees(self) -> None:
        pool, tables, pages, usage, kv = jax.device_get(look(self.cache))
        self.tracker.check(pool, tables, self.model)
        assert usage == expected_usage(self.model)
        np.testing.assert_array_equal(kv, contents(self.model, self.layout))
        np.testing.assert_array_equal(pages, self.expected_pages)
        assert np.isnan(pages[:: self.layout.num_pages]).all(), "something was written to the null page"


class EagerMachine(CacheMachine):
    """The same without jit; of one page size, since every shape is compiled anew for every operation."""

    page_size = 2
    wrap = staticmethod(lambda function: function)


@pytest.mark.parametrize(
    ("machine", "examples", "steps"), [(CacheMachine, 20, 40), (EagerMachine, 4, 10)], ids=["jit", "eager"]
)
def test_random_operations(machine: type[CacheMachine], examples: int, steps: int) -> None:
    machine.seen = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
    if machine is CacheMachine:  # dozens of each; what is rarer has small examples elsewhere
        assert {"done", "copies", "sum above num_tokens", "too few pages"} <= machine.seen.keys(), machine.seen


def test_ten_thousand_operations_leak_nothing() -> None:
    rng = np.random.default_rng(0)
    layout = KVLayout(1, 4096, 4, num_kv_heads=1, head_dim=1)
    max_seqs, longest, num_tokens = 16, 1024, 256
    cache = poisoned_cache(layout, max_seqs=max_seqs, pages_per_seq=longest // layout.page_size)
    grow = jax.jit(partial(paged_jax.append, num_tokens=num_tokens))
    decode, fork, reorder, truncate, release = map(
        jax.jit, (paged_jax.append_decode, paged_jax.fork, paged_jax.reorder, paged_jax.truncate, paged_jax.release)
    )
    lens = np.zeros(max_seqs, np.int32)
    refused = 0
    for step in range(10_000):
        match rng.choice(6, p=[0.3, 0.3, 0.12, 0.1, 0.13, 0.05]):
            case 0 | 1 as kind:
                if kind:
                    counts = rng.integers(0, 2, max_seqs, np.int32)
                    cache, _, ok = decode(cache, counts > 0)
                else:
                    counts = rng.integers(0, 32, max_seqs, np.int32) * rng.integers(0, 2, max_seqs, np.int32)
                    cache, _, ok = grow(cache, counts)
                fits = counts.sum() <= num_tokens and (lens + counts).max() <= longest
                assert fits or not ok  # whether the pages suffice is the state machine's to check
                lens += counts * np.asarray(ok)
                refused += not ok
            case 2:
                src, dst = rng.integers(0, max_seqs, 2, np.int32), rng.permutation(max_seqs)[:2].astype(np.int32)
                cache, parents = fork(cache, src, dst), np.arange(max_seqs)
                parents[dst] = src
                lens = lens[parents]
            case 3:
                parents = np.where(rng.random(max_seqs) < 0.8, np.arange(max_seqs), rng.integers(0, max_seqs, max_seqs))
                cache, lens = reorder(cache, parents.astype(np.int32)), lens[parents]
            case 4:
                lens = np.maximum(lens - rng.integers(0, 40, max_seqs, np.int32), 0)
                cache = truncate(cache, lens)
            case _:
                gone = rng.random(max_seqs) < 0.2
                cache, lens = release(cache, gone), np.where(gone, 0, lens)
        if step % 1000 == 0:
            check_pool(cache.pool, cache.tables, page_size=layout.page_size)
            assert cache.tables.seq_lens.tolist() == lens.tolist()
    assert 0 < refused < 5000
    check_pool(cache.pool, cache.tables, page_size=layout.page_size)
    check_all_free(release(cache, np.ones(max_seqs, bool)).pool)


def test_a_thousand_steps_in_one_while_loop_leak_nothing() -> None:
    """Fork, append with copy-on-write, write and free inside one compiled loop, as a tree search would."""
    layout = KVLayout(2, 40, 3, num_kv_heads=1, head_dim=1)
    cache = poisoned_cache(layout, max_seqs=4, pages_per_seq=6)

    def body(carry: tuple[Array, PagedCache, Array, Array]) -> tuple[Array, PagedCache, Array, Array]:
        step, cache, all_ok, copied = carry
        source = step % 4
        cache = paged_jax.fork(cache, source[None], (step * 7 % 4)[None])
        copied += block_tables.append_decode(cache.tables, cache.pool, jnp.ones(4, bool), page_size=3)[3].count
        cache, batch, ok = paged_jax.append_decode(cache, jnp.ones(4, bool))
        kv = jnp.full((2, 2, 4, 1, 1), 1.0, jnp.float32)
        cache = write_all(cache, batch, kv)
        cache = paged_jax.release(cache, cache.tables.seq_lens == 18)
        return step + 1, cache, all_ok & ok, copied

    @jax.jit
    def run(cache: PagedCache) -> tuple[PagedCache, Array, Array]:
        carry = (jnp.int32(0), cache, jnp.bool_(True), jnp.int32(0))
        _, cache, all_ok, copied = lax.while_loop(lambda carry: carry[0] < 1000, body, carry)
        return cache, all_ok, copied

    cache, all_ok, copied = run(cache)
    assert all_ok
    assert copied > 100
    check_pool(cache.pool, cache.tables, page_size=3)
    k, v = gather_all(cache)
    lens = [cache.tables.seq_lens.tolist()] * layout.num_layers
    assert k.sum(axis=(-1, -2, -3)).tolist() == v.sum(axis=(-1, -2, -3)).tolist() == lens
    check_all_free(paged_jax.release(cache, jnp.ones(4, bool)).pool)
