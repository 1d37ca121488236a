"""A plain-Python model of the paged cache, and the checks that hold a real one against it.

The model keeps no reference counts and no free list: both are recounted from its tables whenever they are wanted.
Its pages have names, never reused; `Tracker` maps the names to page ids and checks that no page moves without need.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax import BlockTables, KVLayout, PagedCache, PagePool, gather_kv


def i32(*values: int) -> Array:
    """An int32 vector."""
    return jnp.array(values, jnp.int32)


def mask(*values: int) -> Array:
    """A bool vector."""
    return jnp.array(values, bool)


def on_host[**P, R](function: Callable[P, R], static: Sequence[str] = ()) -> Callable[P, R]:
    """`function` compiled, its results as numpy arrays: looking at device arrays compiles a program for each look."""
    compiled = jax.jit(function, static_argnames=static)
    return lambda *args, **kwargs: jax.device_get(compiled(*args, **kwargs))


@dataclass
class ModelCache:
    """Sequences as lists of tokens, and their pages as lists of names."""

    max_seqs: int
    pages_per_seq: int
    num_pages: int
    page_size: int
    tokens: list[list[int]] = field(init=False)
    pages: list[list[int]] = field(init=False)
    held: list[int] = field(default_factory=list)  # pages that something beside the tables refers to
    names: Iterable[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.max_seqs)]
        self.pages = [[] for _ in range(self.max_seqs)]

    def references(self) -> Counter[int]:
        return Counter([name for row in self.pages for name in row] + self.held)

    def num_free(self) -> int:
        return self.num_pages - 1 - len(self.references())

    def pages_for(self, num_tokens: int) -> int:
        return (num_tokens + self.page_size - 1) // self.page_size

    def internal_waste(self) -> int:
        """Slots of live pages that hold no token of any sequence."""
        used = dict.fromkeys(self.references(), 0)
        for tokens, pages in zip(self.tokens, self.pages, strict=True):
            for i, name in enumerate(pages):
                used[name] = max(used[name], min(self.page_size, len(tokens) - i * self.page_size))
        return sum(self.page_size - n for n in used.values())

    def copiers(self, counts: Sequence[int]) -> list[int]:
        """Rows that must copy their last page: all writers of a partly filled shared page, but the last of them when
        nothing else refers to it."""
        references, writers = self.references(), dict[int, list[int]]()
        for row, n in enumerate(counts):
            if n > 0 and len(self.tokens[row]) % self.page_size:
                writers.setdefault(self.pages[row][-1], []).append(row)
        rows: list[int] = []
        for name, who in writers.items():
            rows += who[:-1] if len(who) == references[name] else who
        return sorted(rows)

    def refusal(self, counts: Sequence[int], *, num_tokens: int, longest: int) -> str | None:
        """Why a step that appends `counts` cannot be done; None when it can."""
        if min(counts) < 0:
            return "negative count"
        if max(counts) > longest:
            return "count above max_query_len"
        if sum(counts) > num_tokens:
            return "sum above num_tokens"
        lens = [len(tokens) + n for tokens, n in zip(self.tokens, counts, strict=True)]
        if max(lens) > self.pages_per_seq * self.page_size:
            return "row too long"
        new = sum(self.pages_for(n) - len(pages) for n, pages in zip(lens, self.pages, strict=True))
        return "too few pages" if new + len(self.copiers(counts)) > self.num_free() else None

    def append(self, new: Sequence[Sequence[int]]) -> None:
        """Appends tokens; ask `refusal` first."""
        for row in self.copiers([len(tokens) for tokens in new]):
            self.pages[row][-1] = next(self.names)
        for tokens, pages, more in zip(self.tokens, self.pages, new, strict=True):
            tokens += more
            pages += [next(self.names) for _ in range(self.pages_for(len(tokens)) - len(pages))]

    def reorder(self, parents: Sequence[int]) -> None:
        self.tokens = [list(self.tokens[p]) for p in parents]
        self.pages = [list(self.pages[p]) for p in parents]

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> None:
        parents = list(range(self.max_seqs))
        for s, d in zip(src, dst, strict=True):
            if d >= 0:
                parents[d] = s
        self.reorder(parents)

    def truncate(self, lens: Sequence[int]) -> None:
        for row, n in enumerate(lens):
            del self.tokens[row][max(n, 0) :]
            del self.pages[row][self.pages_for(len(self.tokens[row])) :]

    def release(self, rows: Sequence[bool]) -> None:
        self.truncate([0 if gone else len(tokens) for gone, tokens in zip(rows, self.tokens, strict=True)])


class Tracker:
    """Which page id each of a model's pages has."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def check(self, pool: PagePool, tables: BlockTables, model: ModelCache) -> None:
        """Every invariant of the metadata (on the host), and its sharing against the model's."""
        assert tables.seq_lens.tolist() == [len(tokens) for tokens in model.tokens]
        seen: dict[int, int] = {}
        for row, names in enumerate(model.pages):
            for name, page_id in zip(names, tables.page_ids[row].tolist(), strict=False):
                assert seen.setdefault(name, page_id) == page_id, "a shared page was copied without need"
                assert self.ids.get(name, page_id) == page_id, "a page moved although it could be written in place"
        live = model.references()
        self.ids = {name: self.ids[name] if name in self.ids else seen[name] for name in live}
        assert len(set(self.ids.values())) == len(live), "two pages of the model share one page id"
        assert int(pool.num_free) == model.num_free()
        check_pool(pool, tables, page_size=model.page_size, held=[self.ids[name] for name in model.held])


def check_pool(pool: PagePool, tables: BlockTables, *, page_size: int, held: Iterable[int] = ()) -> None:
    """Every page is free exactly once, or referred to exactly as often as its count says; the null page is neither."""
    assert {array.dtype for array in (*pool, *tables)} == {np.dtype(np.int32)}
    (page_ids, lens), (free_stack, num_free, ref_counts) = jax.device_get((tables, pool))
    owned = np.arange(page_ids.shape[1]) < -(-lens // page_size)[:, None]
    assert not page_ids[~owned].any(), "an entry past a sequence's end is not the null page"
    assert page_ids[owned].all(), "a sequence owns the null page"
    references = np.bincount([*page_ids[owned], *held], minlength=pool.num_pages)
    np.testing.assert_array_equal(ref_counts, references)
    free = np.sort(free_stack[:num_free])
    np.testing.assert_array_equal(free, np.flatnonzero(references[1:] == 0) + 1)


def check_all_free(pool: PagePool) -> None:
    """Nothing leaked: every page but the null page is free, once."""
    pool = jax.device_get(pool)
    assert int(pool.num_free) == pool.num_pages - 1
    assert sorted(pool.free_stack[: pool.num_pages - 1].tolist()) == list(range(1, pool.num_pages))
    assert not pool.ref_counts.any()


def shuffled_pool(num_pages: int, seed: int) -> PagePool:
    """All pages free, in random order; what lies above the stack's top is not a page at all."""
    order = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
    return PagePool(
        free_stack=jnp.array([*order, -7], jnp.int32),
        num_free=jnp.int32(num_pages - 1),
        ref_counts=jnp.zeros(num_pages, jnp.int32),
    )


def poisoned_cache(layout: KVLayout, *, max_seqs: int, pages_per_seq: int, seed: int = 0) -> PagedCache:
    """An empty cache with pages of NaN (of scales that are NaN, if quantised), handed out in random order."""
    cache = PagedCache.create(layout, max_seqs=max_seqs, pages_per_seq=pages_per_seq)
    poison = jax.tree.map(lambda x: jnp.full(x.shape, -128 if x.dtype == jnp.int8 else jnp.nan, x.dtype), cache.kv)
    return PagedCache(poison, shuffled_pool(layout.num_pages, seed), cache.tables)


def keys_and_values(tokens: Iterable[int], layout: KVLayout) -> np.ndarray:
    """float32 [2 (keys, values), num_layers, tokens, num_kv_heads, head_dim], no two numbers alike; NaN for token 0,
    which stands for padding."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    token = np.array(list(tokens), np.float32)[:, None]
    numbers = np.where(token > 0, token * np.prod(shape) + np.arange(np.prod(shape)), np.nan)
    return numbers.reshape(-1, *shape).transpose(2, 1, 0, 3, 4).astype(np.float32)


def contents(model: ModelCache, layout: KVLayout) -> np.ndarray:
    """What `gather_all` should give."""
    max_len = model.pages_per_seq * model.page_size
    out = np.zeros((2, layout.num_layers, model.max_seqs, max_len, layout.num_kv_heads, layout.head_dim), np.float32)
    for row, tokens in enumerate(model.tokens):
        out[:, :, row, : len(tokens)] = keys_and_values(tokens, layout)
    return out


def expected_usage(model: ModelCache) -> dict[str, int]:
    """What `usage` should give."""
    return {
        "live": len(model.references()),
        "free": model.num_free(),
        "tokens": sum(map(len, model.tokens)),
        "internal_waste": model.internal_waste(),
    }


@jax.jit
def gather_all(cache: PagedCache) -> Array:
    """[2 (keys, values), num_layers, max_seqs, pages_per_seq * page_size, num_kv_heads, head_dim]."""
    return jnp.stack([jnp.stack(gather_kv(cache, layer=layer)) for layer in range(cache.layout.num_layers)], axis=1)


def bits(pages: Array) -> np.ndarray:
    """The bytes of a pool, so that NaN equals NaN."""
    return np.asarray(pages).view(np.uint8)
