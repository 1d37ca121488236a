"""Block tables by small examples: what a step's batch says, copy-on-write, all or nothing, vmap."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from paged_jax import BlockTables, PagePool, block_tables, page_pool
from tests.paged_jax.model_cache import check_all_free, check_pool, i32, mask, on_host, shuffled_pool

# All tests use the same shapes, so that each operation is compiled once.
PAGE_SIZE = 4
MAX_SEQS = 4
NUM_PAGES = 16
NUM_TOKENS = 10

State = tuple[BlockTables, PagePool]

reorder = on_host(block_tables.reorder)
fork = on_host(block_tables.fork)
_append = on_host(block_tables.append, ["page_size", "num_tokens", "max_query_len"])
_append_decode = on_host(block_tables.append_decode, ["page_size"])
_truncate = on_host(block_tables.truncate, ["page_size"])
retain = on_host(page_pool.retain)
allocate = on_host(page_pool.allocate, ["limit"])
_release = on_host(block_tables.release)


def padded(*values: int) -> list[int]:
    return [*values, *[0] * (MAX_SEQS - len(values))]


def start(*lens: int) -> State:
    """Sequences of the given lengths, whose pages are numbered from 1 on; the lowest free page is taken next."""
    page_ids, taken = [], 0
    for n in padded(*lens):
        owned = -(-n // PAGE_SIZE)
        page_ids.append([*range(taken + 1, taken + owned + 1), *[0] * (3 - owned)])
        taken += owned
    pool = PagePool(
        free_stack=jnp.arange(NUM_PAGES - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(NUM_PAGES - 1 - taken),
        ref_counts=jnp.array([0] + [1] * taken + [0] * (NUM_PAGES - 1 - taken), jnp.int32),
    )
    return BlockTables(jnp.array(page_ids, jnp.int32), i32(*padded(*lens))), pool


def append(
    tables: BlockTables, pool: PagePool, counts: Sequence[int], max_query_len: int | None = None
) -> block_tables.Grown:
    counts = i32(*padded(*counts))
    return _append(tables, pool, counts, page_size=PAGE_SIZE, num_tokens=NUM_TOKENS, max_query_len=max_query_len)


def append_decode(tables: BlockTables, pool: PagePool, active: Sequence[int]) -> block_tables.Grown:
    return _append_decode(tables, pool, mask(*padded(*active)), page_size=PAGE_SIZE)


def truncate(tables: BlockTables, pool: PagePool, lens: Sequence[int]) -> State:
    return _truncate(tables, pool, i32(*padded(*lens)), page_size=PAGE_SIZE)


def release(tables: BlockTables, pool: PagePool, rows: Sequence[int]) -> State:
    return _release(tables, pool, mask(*padded(*rows)))


def only_free(pool: PagePool, wanted: int) -> tuple[PagePool, list[int]]:
    """Takes pages away until `wanted` are free; also gives the pages taken."""
    pool, taken, _ = allocate(pool, jnp.int32(pool.num_free - wanted), limit=NUM_PAGES)
    return pool, [page for page in taken.tolist() if page]


def check(state: State, held: Sequence[int] = ()) -> None:
    check_pool(state[1], state[0], page_size=PAGE_SIZE, held=held)


def rows(tables: BlockTables, n: int) -> list[list[int]]:
    """The pages of the first n rows; the others hold nothing."""
    assert not tables.page_ids[n:].any()
    assert not tables.seq_lens[n:].any()
    return [[page for page in row if page] for row in tables.page_ids[:n].tolist()]


@pytest.mark.parametrize(("sizes", "name"), [((0, 3), "max_seqs"), ((2, 0), "pages_per_seq")])
def test_create_refuses(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        block_tables.create(*sizes)


def test_create_is_empty() -> None:
    tables = block_tables.create(2, 3)
    assert tables.page_ids.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert tables.seq_lens.tolist() == [0, 0]
    check((tables, page_pool.create(4)))


def test_append_packs_ragged_tokens() -> None:
    tables, pool = start(5, 0, 4, 2)
    assert tables.page_ids.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0], [4, 0, 0]]
    tables, pool, batch, copies, ok = append(tables, pool, (2, 5, 1, 0))
    assert ok
    check((tables, pool))
    assert tables.page_ids.tolist() == [[1, 2, 0], [5, 6, 0], [3, 7, 0], [4, 0, 0]]
    assert tables.seq_lens.tolist() == [7, 5, 5, 2]
    assert int(copies.count) == 0
    assert batch.block_tables.tolist() == tables.page_ids.tolist()
    assert batch.seq_lens.tolist() == [7, 5, 5, 0]
    assert batch.cu_query_lens.tolist() == [0, 2, 7, 8, 8]
    assert batch.positions.tolist() == [5, 6, 0, 1, 2, 3, 4, 4, 0, 0]
    assert batch.slot_mapping.tolist() == [9, 10, 20, 21, 22, 23, 24, 28, -1, -1]
    assert batch.logit_rows.tolist() == [1, 6, 7, 0]
    assert batch.max_query_len == NUM_TOKENS
    assert batch.implementation is None


def test_append_decode_keeps_every_row_in_its_place() -> None:
    tables, pool, batch, copies, ok = append_decode(*start(4, 0, 3, 2), (1, 1, 0, 1))
    assert ok
    check((tables, pool))
    assert tables.seq_lens.tolist() == [5, 1, 3, 3]
    assert int(copies.count) == 0
    assert batch.seq_lens.tolist() == [5, 1, 0, 3]
    assert batch.cu_query_lens.tolist() == [0, 1, 2, 3, 4]
    assert batch.positions.tolist() == [4, 0, 0, 2]
    assert batch.slot_mapping.tolist() == [16, 20, -1, 14]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.max_query_len == 1


def test_a_shared_partial_page_is_copied_by_all_writers_but_the_last() -> None:
    tables, pool = fork(*start(6), i32(0, 0), i32(1, 3))
    assert tables.page_ids.tolist() == [[1, 2, 0], [1, 2, 0], [0, 0, 0], [1, 2, 0]]
    assert pool.ref_counts[:3].tolist() == [0, 3, 3]
    tables, pool, batch, copies, ok = append_decode(tables, pool, (1, 1, 0, 1))
    assert ok
    check((tables, pool))
    assert tables.page_ids.tolist() == [[1, 3, 0], [1, 4, 0], [0, 0, 0], [1, 2, 0]]
    assert int(copies.count) == 2
    assert (copies.src[:2].tolist(), copies.dst[:2].tolist()) == ([2, 2], [3, 4])
    assert batch.slot_mapping.tolist() == [14, 18, -1, 10]
    assert pool.ref_counts[:6].tolist() == [0, 3, 1, 1, 1, 0]


def test_every_writer_copies_while_a_resting_row_names_the_page() -> None:
    tables, pool = fork(*start(6), i32(0, 0), i32(1, 2))
    tables, pool, _, copies, ok = append_decode(tables, pool, (1, 0, 1))
    assert ok
    check((tables, pool))
    assert int(copies.count) == 2
    assert rows(tables, 3) == [[1, 3], [1, 2], [1, 4]]


def test_every_writer_copies_while_something_beside_the_tables_holds_the_page() -> None:
    tables, pool = start(6)
    tables, pool, _, copies, ok = append_decode(tables, retain(pool, i32(2)), (1,))
    assert ok
    check((tables, pool), held=[2])
    assert int(copies.count) == 1
    assert rows(tables, 1) == [[1, 3]]


def test_a_shared_full_page_is_not_copied() -> None:
    tables, pool = fork(*start(4), i32(0, 0), i32(1, -1))
    tables, pool, _, copies, ok = append(tables, pool, (3, 2))
    assert ok
    check((tables, pool))
    assert int(copies.count) == 0
    assert rows(tables, 2) == [[1, 2], [1, 3]]


def test_a_page_with_one_reference_is_written_in_place() -> None:
    tables, pool, batch, copies, ok = append(*start(6, 1), (2, 2))
    assert ok
    check((tables, pool))
    assert int(copies.count) == 0
    assert rows(tables, 2) == [[1, 2], [3]]
    assert batch.slot_mapping[:4].tolist() == [10, 11, 13, 14]


def test_truncating_into_a_shared_full_page_makes_it_copied() -> None:
    state = truncate(*fork(*start(8), i32(0, 0), i32(1, -1)), (3, 8))
    check(state)
    assert rows(state[0], 2) == [[1], [1, 2]]
    tables, pool, _, copies, ok = append_decode(*state, (1, 1))
    assert ok
    check((tables, pool))
    assert rows(tables, 2) == [[3], [1, 2, 4]]
    assert (copies.src[0], copies.dst[0], copies.count) == (1, 3, 1)


@pytest.mark.parametrize(
    ("counts", "free", "max_query_len"),
    [
        ((1, 1, 0), 1, None),
        ((7, 0, 0), 9, None),
        ((-1, 1, 1), 9, None),
        ((4, 4, 3), 9, None),
        ((0, 3, 1), 9, 2),
        ((2**31 - 1, 2**31 - 1, 3), 9, None),
    ],
    ids=["too few pages", "row too long", "negative", "sum", "query too long", "sum that wraps"],
)
def test_append_is_all_or_nothing(counts: tuple[int, ...], free: int, max_query_len: int | None) -> None:
    tables, pool = fork(*start(6, 4), i32(0, 0), i32(2, -1))
    pool, _ = only_free(pool, free)
    new_tables, new_pool, batch, copies, ok = append(tables, pool, counts, max_query_len)
    assert not ok
    chex.assert_trees_all_equal((new_tables, new_pool), (tables, pool))
    assert (batch.slot_mapping == -1).all()
    assert not batch.seq_lens.any()
    assert not batch.cu_query_lens.any()
    assert int(copies.count) == 0


def test_append_takes_the_last_page() -> None:
    tables, pool = fork(*start(6, 4), i32(0, 0), i32(2, -1))
    pool, held = only_free(pool, 2)
    tables, pool, _, copies, ok = append(tables, pool, (1, 1, 0))
    assert ok
    assert int(copies.count) == 1
    assert int(pool.num_free) == 0
    check((tables, pool), held)


def test_append_fills_a_row() -> None:
    tables, pool, _, _, ok = append(*start(8), (4,))
    assert ok
    check((tables, pool))
    assert tables.seq_lens[0] == 12


@pytest.mark.parametrize(("active", "free"), [((1, 0, 0), 0), ((0, 1, 0), 9)], ids=["too few pages", "row too long"])
def test_append_decode_is_all_or_nothing(active: tuple[int, ...], free: int) -> None:
    tables, pool = start(4, 12, 1)
    pool, _ = only_free(pool, free)
    new_tables, new_pool, batch, copies, ok = append_decode(tables, pool, active)
    assert not ok
    chex.assert_trees_all_equal((new_tables, new_pool), (tables, pool))
    assert (batch.slot_mapping == -1).all()
    assert not batch.seq_lens.any()
    assert int(copies.count) == 0


@pytest.mark.parametrize(
    ("num_tokens", "max_query_len", "message"),
    [
        (0, None, "num_tokens must be at least 1, got 0"),
        (4, 0, r"max_query_len must be in 1\.\.num_tokens = 4, got 0"),
        (4, 5, r"max_query_len must be in 1\.\.num_tokens = 4, got 5"),
    ],
)
def test_append_refuses(num_tokens: int, max_query_len: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_tables.append(
            *start(1),
            i32(1, 0, 0, 0),
            page_size=PAGE_SIZE,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
        )


def test_reorder_moves_all_rows_at_once() -> None:
    tables, pool = reorder(*start(5, 1, 2), i32(1, 0, 0, 3))
    check((tables, pool))
    assert rows(tables, 3) == [[3], [1, 2], [1, 2]]
    assert tables.seq_lens.tolist() == [1, 5, 5, 0]
    assert pool.ref_counts[:5].tolist() == [0, 2, 2, 1, 0]


def test_reorder_keeps_a_page_whose_only_holder_moves() -> None:
    """Retaining comes before releasing: otherwise the page would be free for a moment, and stay on the stack."""
    tables, pool = reorder(*start(3), i32(1, 0, 2, 3))
    check((tables, pool))
    assert tables.page_ids.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert pool.ref_counts[:3].tolist() == [0, 1, 0]


def test_the_identity_changes_nothing() -> None:
    state = fork(*start(5, 1), i32(0, 0), i32(2, -1))
    chex.assert_trees_all_equal(reorder(*state, i32(0, 1, 2, 3)), state)
    chex.assert_trees_all_equal(fork(*state, i32(0, 1), i32(-1, -1)), state)
    chex.assert_trees_all_equal(fork(*state, i32(1, 2), i32(1, 2)), state)


def test_fork_releases_what_the_destination_held() -> None:
    tables, pool = fork(*start(5, 8, 1), i32(2, 0), i32(1, -1))
    check((tables, pool))
    assert rows(tables, 3) == [[1, 2], [5], [5]]
    assert pool.ref_counts[:6].tolist() == [0, 1, 1, 0, 0, 2]


def test_forks_happen_at_once() -> None:
    tables, pool = fork(*start(1, 2, 3), i32(0, 1), i32(1, 2))
    check((tables, pool))
    assert tables.seq_lens.tolist() == [1, 1, 2, 0]  # row 2 is what row 1 was


def test_truncate_gives_back_whole_pages_only() -> None:
    tables, pool = truncate(*start(9, 4, 5, 2), (5, 4, -3, 100))
    check((tables, pool))
    assert tables.seq_lens.tolist() == [5, 4, 0, 2]
    assert tables.page_ids.tolist() == [[1, 2, 0], [4, 0, 0], [0, 0, 0], [7, 0, 0]]


def test_truncate_then_append_goes_on_where_it_was_cut() -> None:
    tables, pool, batch, copies, ok = append(*truncate(*start(9), (5,)), (2,))
    assert ok
    check((tables, pool))
    assert int(copies.count) == 0
    assert batch.positions[:2].tolist() == [5, 6]
    assert batch.slot_mapping[:2].tolist() == [9, 10]


def test_release_twice_is_release_once() -> None:
    once = release(*fork(*start(5, 0, 3), i32(0, 0), i32(1, -1)), (1, 0, 1))
    check(once)
    assert once[0].page_ids.tolist() == [[0, 0, 0], [1, 2, 0], [0, 0, 0], [0, 0, 0]]
    chex.assert_trees_all_equal(release(*once, (1, 0, 1)), once)
    check_all_free(release(*once, (1, 1, 1))[1])


def test_metadata_stays_int32_in_loops() -> None:
    """Carries of a while_loop must keep their dtype, also where x64 makes sums and aranges int64."""

    def body(state: State) -> State:
        tables, pool, *_ = block_tables.append(*state, i32(1, 2, 0, 0), page_size=PAGE_SIZE, num_tokens=3)
        tables, pool, *_ = block_tables.append_decode(tables, pool, mask(1, 1, 0, 0), page_size=PAGE_SIZE)
        tables, pool = block_tables.fork(tables, pool, i32(1), i32(0))
        tables, pool = block_tables.release(tables, pool, mask(0, 0, 1, 1))
        return block_tables.truncate(tables, pool, tables.seq_lens - 1, page_size=PAGE_SIZE)

    tables, pool = lax.while_loop(lambda state: state[0].seq_lens[1] < 9, body, start())
    check((tables, pool))
    assert tables.seq_lens.tolist() == [10, 10, 0, 0]


def test_batches_and_copies_are_int32() -> None:
    for grown in (append(*start(2), (1, 2)), append_decode(*start(2), (1, 1))):
        assert {leaf.dtype for leaf in jax.tree.leaves(grown[:-1])} == {jnp.dtype(jnp.int32)}
        assert grown[-1].dtype == bool


def test_vmap_equals_a_loop() -> None:
    states = []
    for seed, (lens, free) in enumerate([((5, 2, 0, 1), 4), ((1, 0, 4, 0), 4), ((5, 3, 1, 1), 0)]):
        tables, pool, *_, ok = append(start()[0], shuffled_pool(NUM_PAGES, seed), lens)
        assert ok
        states.append((tables, only_free(pool, free)[0]))

    def steps(ops: Any, state: State, parents: Array, counts: Array) -> tuple[Any, ...]:
        fork, append, reorder, truncate, release = ops
        state = fork(*state, parents[:2], parents[2:])
        *state, batch, copies, ok = append(*state, counts, page_size=PAGE_SIZE, num_tokens=NUM_TOKENS)
        state = reorder(*state, parents)
        state = truncate(*state, counts + 2, page_size=PAGE_SIZE)
        return release(*state, counts == 0), batch, copies, ok

    parents = jnp.array([[0, 1, 1, 3], [2, 0, 3, 1], [1, 0, 0, 3]], jnp.int32)
    counts = jnp.array([[2, 2, 0, 1], [3, 0, 1, 0], [3, 3, 4, 0]], jnp.int32)
    pure = block_tables.fork, block_tables.append, block_tables.reorder, block_tables.truncate, block_tables.release
    batched = on_host(jax.vmap(partial(steps, pure)))
    stacked = batched(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), parents, counts)
    for i, state in enumerate(states):
        compiled = fork, _append, reorder, _truncate, _release
        expected = steps(compiled, state, np.array(parents[i]), np.array(counts[i]))
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), expected)
    assert stacked[-1].tolist() == [True, True, False], "the last does not fit"


def test_a_step_is_traced_once() -> None:
    """Lengths, sharing and which rows are active are data, never a reason to compile again."""
    counted = jax.jit(chex.assert_max_traces(block_tables.append_decode, n=1), static_argnames="page_size")
    tables, pool = start(1, 5)
    for step in range(10):
        tables, pool, *_, ok = counted(tables, pool, mask(1, 0, step % 3, step % 2), page_size=PAGE_SIZE)
        assert ok
        tables, pool = fork(tables, pool, i32(0, 0), i32(step % 4 - 1, -1))
    check((tables, pool))
