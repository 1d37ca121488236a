"""Block tables by small examples: what a step's batch says, copy-on-write, all or nothing, vmap."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from paged_jax import BlockTables, PagePool, block_tables, page_pool
from tests.paged_jax.model_cache import check_all_free, check_pool, i32, mask, shuffled_pool

PAGE_SIZE = 4

append = jax.jit(block_tables.append, static_argnames=("page_size", "num_tokens", "max_query_len"))
append_decode = jax.jit(block_tables.append_decode, static_argnames="page_size")
reorder = jax.jit(block_tables.reorder)
fork = jax.jit(block_tables.fork)
truncate = jax.jit(block_tables.truncate, static_argnames="page_size")
release = jax.jit(block_tables.release)

State = tuple[BlockTables, PagePool]


def start(*lens: int, num_pages: int = 12, pages_per_seq: int = 3) -> State:
    """Sequences of the given lengths; the pages are numbered in the order they are taken."""
    tables, pool = block_tables.create(len(lens), pages_per_seq), page_pool.create(num_pages)
    tables, pool, *_, ok = append(tables, pool, i32(*lens), page_size=PAGE_SIZE, num_tokens=max(1, sum(lens)))
    assert ok
    return tables, pool


def check(state: State) -> None:
    check_pool(state[1], state[0], page_size=PAGE_SIZE)


@pytest.mark.parametrize(("sizes", "name"), [((0, 3), "max_seqs"), ((2, 0), "pages_per_seq")])
def test_create_refuses(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        block_tables.create(*sizes)


def test_append_packs_ragged_tokens() -> None:
    tables, pool = start(5, 0, 4, 2)
    assert tables.page_ids.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0], [4, 0, 0]]
    tables, pool, batch, copies, ok = append(tables, pool, i32(2, 5, 1, 0), page_size=PAGE_SIZE, num_tokens=10)
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
    assert batch.max_query_len == 10
    assert batch.implementation is None


def test_append_decode_keeps_every_row_in_its_place() -> None:
    tables, pool = start(4, 0, 3, 2)
    tables, pool, batch, copies, ok = append_decode(tables, pool, mask(1, 1, 0, 1), page_size=PAGE_SIZE)
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
    tables, pool = fork(*start(6, 0, 0, 0), i32(0, 0), i32(1, 3))
    assert tables.page_ids.tolist() == [[1, 2, 0], [1, 2, 0], [0, 0, 0], [1, 2, 0]]
    assert pool.ref_counts[:3].tolist() == [0, 3, 3]
    tables, pool, batch, copies, ok = append_decode(tables, pool, mask(1, 1, 0, 1), page_size=PAGE_SIZE)
    assert ok
    check((tables, pool))
    assert tables.page_ids.tolist() == [[1, 3, 0], [1, 4, 0], [0, 0, 0], [1, 2, 0]]
    assert int(copies.count) == 2
    assert (copies.src[:2].tolist(), copies.dst[:2].tolist()) == ([2, 2], [3, 4])
    assert batch.slot_mapping.tolist() == [14, 18, -1, 10]
    assert pool.ref_counts.tolist() == [0, 3, 1, 1, 1] + [0] * 7


def test_every_writer_copies_while_a_resting_row_names_the_page() -> None:
    tables, pool = fork(*start(6, 0, 0), i32(0, 0), i32(1, 2))
    tables, pool, _, copies, ok = append_decode(tables, pool, mask(1, 0, 1), page_size=PAGE_SIZE)
    assert ok
    check((tables, pool))
    assert int(copies.count) == 2
    assert tables.page_ids.tolist() == [[1, 3, 0], [1, 2, 0], [1, 4, 0]]


def test_every_writer_copies_while_something_beside_the_tables_holds_the_page() -> None:
    tables, pool = start(6)
    tables, pool, _, copies, ok = append_decode(tables, page_pool.retain(pool, i32(2)), mask(1), page_size=PAGE_SIZE)
    assert ok
    assert int(copies.count) == 1
    assert tables.page_ids.tolist() == [[1, 3, 0]]
    assert pool.ref_counts[:4].tolist() == [0, 1, 1, 1]


def test_a_shared_full_page_is_not_copied() -> None:
    tables, pool = fork(*start(4, 0), i32(0), i32(1))
    tables, pool, _, copies, ok = append(tables, pool, i32(3, 2), page_size=PAGE_SIZE, num_tokens=5)
    assert ok
    check((tables, pool))
    assert int(copies.count) == 0
    assert tables.page_ids.tolist() == [[1, 2, 0], [1, 3, 0]]


def test_an_unshared_page_is_written_in_place() -> None:
    tables, pool = start(6, 1)
    new, pool, batch, copies, ok = append(tables, pool, i32(2, 2), page_size=PAGE_SIZE, num_tokens=4)
    assert ok
    assert int(copies.count) == 0
    assert new.page_ids.tolist() == tables.page_ids.tolist()
    assert batch.slot_mapping.tolist() == [10, 11, 13, 14]


def test_truncating_into_a_shared_full_page_makes_it_copied() -> None:
    tables, pool = fork(*start(8, 0), i32(0), i32(1))
    tables, pool = truncate(tables, pool, i32(3, 8), page_size=PAGE_SIZE)
    check((tables, pool))
    assert tables.page_ids.tolist() == [[1, 0, 0], [1, 2, 0]]
    tables, pool, _, copies, ok = append_decode(tables, pool, mask(1, 1), page_size=PAGE_SIZE)
    assert ok
    check((tables, pool))
    assert tables.page_ids.tolist() == [[3, 0, 0], [1, 2, 4]]
    assert (copies.src[0], copies.dst[0], copies.count) == (1, 3, 1)


@pytest.mark.parametrize(
    ("counts", "num_pages", "num_tokens", "max_query_len"),
    [
        ((1, 1, 0), 5, 4, None),
        ((7, 0, 0), 20, 9, None),
        ((-1, 1, 1), 20, 4, None),
        ((2, 2, 1), 20, 4, None),
        ((0, 3, 1), 20, 4, 2),
        ((2**31 - 1, 2**31 - 1, 3), 20, 4, None),
    ],
    ids=["too few pages", "row too long", "negative", "sum", "query too long", "sum that wraps"],
)
def test_append_is_all_or_nothing(
    counts: tuple[int, ...], num_pages: int, num_tokens: int, max_query_len: int | None
) -> None:
    tables, pool = fork(*start(6, 4, 0, num_pages=num_pages), i32(0), i32(2))
    new_tables, new_pool, batch, copies, ok = append(
        tables, pool, i32(*counts), page_size=PAGE_SIZE, num_tokens=num_tokens, max_query_len=max_query_len
    )
    assert not ok
    chex.assert_trees_all_equal((new_tables, new_pool), (tables, pool))
    assert (batch.slot_mapping == -1).all()
    assert not batch.seq_lens.any()
    assert not batch.cu_query_lens.any()
    assert int(copies.count) == 0


def test_append_fits_exactly() -> None:
    tables, pool = fork(*start(6, 4, 0, num_pages=6), i32(0), i32(2))  # 3 pages used, 2 free
    tables, pool, _, copies, ok = append(tables, pool, i32(1, 1, 0), page_size=PAGE_SIZE, num_tokens=2)
    assert ok
    assert int(copies.count) == 1
    assert int(pool.num_free) == 0
    check((tables, pool))
    tables, pool = start(8, num_pages=4)
    assert append(tables, pool, i32(4), page_size=PAGE_SIZE, num_tokens=4)[-1]


def test_append_decode_is_all_or_nothing() -> None:
    tables, pool = start(4, 12, 1, num_pages=12)
    for active in ((1, 1, 0), (0, 1, 0)):  # row 1 is full
        new_tables, new_pool, batch, copies, ok = append_decode(tables, pool, mask(*active), page_size=PAGE_SIZE)
        assert not ok
        chex.assert_trees_all_equal((new_tables, new_pool), (tables, pool))
        assert batch.slot_mapping.tolist() == [-1] * 3
        assert batch.seq_lens.tolist() == [0] * 3
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
    tables, pool = start(1)
    with pytest.raises(ValueError, match=message):
        block_tables.append(
            tables, pool, i32(1), page_size=PAGE_SIZE, num_tokens=num_tokens, max_query_len=max_query_len
        )


def test_reorder_moves_all_rows_at_once() -> None:
    tables, pool = start(5, 1, 2)
    new, pool = reorder(tables, pool, i32(1, 0, 0))
    check((new, pool))
    assert new.page_ids.tolist() == [[3, 0, 0], [1, 2, 0], [1, 2, 0]]
    assert new.seq_lens.tolist() == [1, 5, 5]
    assert pool.ref_counts[:5].tolist() == [0, 2, 2, 1, 0]


def test_reorder_keeps_a_page_whose_only_holder_moves() -> None:
    """Retaining comes before releasing: otherwise the page would be free for a moment, and stay on the stack."""
    tables, pool = start(3, 0)
    new, pool = reorder(tables, pool, i32(1, 0))
    check((new, pool))
    assert new.page_ids.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert pool.ref_counts.tolist() == [0, 1] + [0] * 10


def test_the_identity_changes_nothing() -> None:
    state = fork(*start(5, 1, 0), i32(0), i32(2))
    chex.assert_trees_all_equal(reorder(*state, i32(0, 1, 2)), state)
    chex.assert_trees_all_equal(fork(*state, i32(0, 1), i32(-1, -1)), state)
    chex.assert_trees_all_equal(fork(*state, i32(1), i32(1)), state)


def test_fork_releases_what_the_destination_held() -> None:
    tables, pool = fork(*start(5, 8, 1), i32(2), i32(1))
    check((tables, pool))
    assert tables.page_ids.tolist() == [[1, 2, 0], [5, 0, 0], [5, 0, 0]]
    assert pool.ref_counts[:6].tolist() == [0, 1, 1, 0, 0, 2]


def test_forks_happen_at_once_and_negative_ones_are_skipped() -> None:
    tables, pool = fork(*start(1, 2, 3), i32(0, 1, 0), i32(1, 2, -1))
    check((tables, pool))
    assert tables.seq_lens.tolist() == [1, 1, 2]  # row 2 is what row 1 was


def test_truncate_gives_back_whole_pages_only() -> None:
    tables, pool = truncate(*start(9, 4, 5, 2), i32(5, 4, -3, 100), page_size=PAGE_SIZE)
    check((tables, pool))
    assert tables.seq_lens.tolist() == [5, 4, 0, 2]
    assert tables.page_ids.tolist() == [[1, 2, 0], [4, 0, 0], [0, 0, 0], [7, 0, 0]]


def test_truncate_then_append_goes_on_where_it_was_cut() -> None:
    tables, pool = truncate(*start(9), i32(5), page_size=PAGE_SIZE)
    tables, pool, batch, copies, ok = append(tables, pool, i32(2), page_size=PAGE_SIZE, num_tokens=2)
    assert ok
    assert int(copies.count) == 0
    assert batch.positions.tolist() == [5, 6]
    assert batch.slot_mapping.tolist() == [9, 10]


def test_release_twice_is_release_once() -> None:
    once = release(*fork(*start(5, 0, 3), i32(0), i32(1)), mask(1, 0, 1))
    check(once)
    assert once[0].page_ids.tolist() == [[0, 0, 0], [1, 2, 0], [0, 0, 0]]
    chex.assert_trees_all_equal(release(*once, mask(1, 0, 1)), once)
    check_all_free(release(*once, mask(1, 1, 1))[1])


def test_metadata_stays_int32_in_loops() -> None:
    """Carries of a while_loop must keep their dtype, also where x64 makes sums and aranges int64."""

    def body(state: State) -> State:
        tables, pool, *_ = block_tables.append(*state, i32(1, 2), page_size=PAGE_SIZE, num_tokens=3)
        tables, pool, *_ = block_tables.append_decode(tables, pool, mask(1, 1), page_size=PAGE_SIZE)
        tables, pool = block_tables.fork(tables, pool, i32(1), i32(0))
        return block_tables.truncate(tables, pool, tables.seq_lens - 1, page_size=PAGE_SIZE)

    tables, pool = lax.while_loop(lambda state: state[0].seq_lens[1] < 9, body, start(0, 0))
    check((tables, pool))
    assert tables.seq_lens.tolist() == [10, 10]


def test_batches_and_copies_are_int32() -> None:
    for grown in (
        block_tables.append(*start(2, 0), i32(1, 2), page_size=PAGE_SIZE, num_tokens=3),
        block_tables.append_decode(*start(2, 0), mask(1, 1), page_size=PAGE_SIZE),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(grown[:-1])} == {jnp.dtype(jnp.int32)}


def test_vmap_equals_a_loop() -> None:
    lens = [(5, 2, 0), (1, 0, 4), (6, 6, 6)]
    states = []
    for seed, row in enumerate(lens):
        tables, pool = block_tables.create(3, 3), shuffled_pool(9, seed)
        tables, pool, *_ = append(tables, pool, i32(*row), page_size=PAGE_SIZE, num_tokens=18)
        states.append((tables, pool))

    def steps(tables: BlockTables, pool: PagePool, parents: Array, counts: Array) -> tuple:
        tables, pool = block_tables.fork(tables, pool, parents[:1], parents[1:2])
        tables, pool, *appended = block_tables.append(tables, pool, counts, page_size=PAGE_SIZE, num_tokens=6)
        tables, pool, *decoded = block_tables.append_decode(tables, pool, counts > 1, page_size=PAGE_SIZE)
        tables, pool = block_tables.reorder(tables, pool, parents)
        tables, pool = block_tables.truncate(tables, pool, counts + 2, page_size=PAGE_SIZE)
        tables, pool = block_tables.release(tables, pool, counts == 0)
        return tables, pool, appended, decoded

    parents = jnp.array([[0, 1, 1], [2, 0, 2], [1, 0, 0]], jnp.int32)
    counts = jnp.array([[2, 2, 0], [3, 0, 1], [2, 2, 2]], jnp.int32)
    stacked = jax.vmap(steps)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), parents, counts)
    for i, state in enumerate(states):
        expected = jax.jit(steps)(*state, parents[i], counts[i])
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), expected)
        check(expected[:2])
    assert len(set(stacked[2][-1].tolist())) == 2, "one of the steps should not fit"


def test_a_step_is_traced_once() -> None:
    """Lengths, sharing and which rows are active are data, never a reason to compile again."""
    counted = jax.jit(chex.assert_max_traces(block_tables.append_decode, n=1), static_argnames="page_size")
    tables, pool = start(1, 0, 0, num_pages=40, pages_per_seq=8)
    for step in range(24):
        tables, pool, *_, ok = counted(tables, pool, mask(1, step % 3, step % 2), page_size=PAGE_SIZE)
        assert ok
        tables, pool = fork(tables, pool, i32(0), i32(step % 4 - 1))
    check((tables, pool))
