"""The scheduler with the prefix index, against a plain-Python memory whose every slot says what is written in it."""

import random
from collections import Counter

import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.layout import KVLayout
from paged_jax.prefix import Namespace, PageKeys
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import SequenceState

VOCAB = 5  # few tokens, so that prefixes coincide by themselves


class Machine:
    """Carries out plans as an engine does, on lists; `run` checks everything that must hold in every step.

    A slot holds the tuple of all tokens up to its own: the next token of a sequence is computed from what its pages
    hold, so that a wrong page shows.
    """

    def __init__(self, num_pages=12, page_size=4, max_seqs=4, max_tokens_per_step=8, max_model_len=40):
        self.layout = KVLayout(1, num_pages, page_size, 1, 2)
        self.config = EngineConfig(
            max_seqs=max_seqs, max_tokens_per_step=max_tokens_per_step, max_model_len=max_model_len
        )
        self.scheduler = Scheduler(self.config, self.layout)
        self.free = list(range(1, num_pages))
        self.refs = Counter()
        self.slots = {}
        self.tables = {row: [] for row in range(max_seqs)}
        self.lens = dict.fromkeys(range(max_seqs), 0)
        self.done = {}
        self.computed = 0
        self.ids = 0

    def add(self, prompt, new=6, n=1, salt=None, reads_cache=True):
        room = min(self.config.max_model_len, (self.layout.num_pages - 1) * self.layout.page_size)
        max_len = min(len(prompt) + new, room)

        def sequence(child):
            keys = PageKeys(Namespace(salt), self.layout.page_size)
            return SequenceState(child, list(prompt), len(prompt), max_len, keys, reads_cache, self.ids)

        first, *others = [sequence(child) for child in range(n)]
        first.children = others
        self.ids += 1
        self.scheduler.add(first)
        return first

    def step(self):
        plan = self.scheduler.plan(len(self.free), self.give_way)
        if plan is None:
            return False
        assert 1 <= plan.num_tokens <= self.config.max_tokens_per_step
        for sequence in plan.admitted:
            self.tables[sequence.row] = [page.page_id for page in sequence.named]
            self.lens[sequence.row] = len(sequence.named) * self.layout.page_size
            self.refs.update(self.tables[sequence.row])
        for page in plan.evicted:
            self.unref(page)
        free = len(self.free)
        self.copy_shared_tails(plan)
        for sequence, count in plan.counts:
            self.write(sequence, count)
        assert free - len(self.free) == plan.num_new_pages, "the scheduler counts the pages of a step exactly"
        for publication in plan.published:
            self.refs[self.tables[publication.sequence.row][publication.page]] += 1
        self.scheduler.commit(plan, self.page_ids())
        forked = {child: parent for parent, children in plan.forked for child in children}
        for child, parent in forked.items():
            self.tables[child.row] = list(self.tables[parent.row])
            self.lens[child.row] = self.lens[parent.row]
            self.refs.update(self.tables[child.row])
        for sequence in [sequence for sequence, _ in plan.counts] + list(forked):
            if sequence.num_cached == len(sequence.tokens):
                sequence.tokens.append(self.next_token(sequence))
                self.check_finished(sequence)
        self.check()
        return True

    def run(self, steps=10_000):
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError("no end in sight")

    def copy_shared_tails(self, plan):
        """What `block_tables.append` does: all that write a shared page copy it, but the last one if nobody is left."""
        writers = Counter()
        tail = {}
        for sequence, count in plan.counts:
            row = sequence.row
            if self.lens[row] % self.layout.page_size and count > sequence.rereads:
                tail[sequence] = self.tables[row][-1]
                writers[tail[sequence]] += 1
        for sequence, page in tail.items():
            if self.refs[page] > 1:
                copy = self.take()
                for offset in range(self.layout.page_size):
                    self.slots[copy, offset] = self.slots.get((page, offset))
                self.unref(page)
                self.tables[sequence.row][-1] = copy

    def write(self, sequence, count):
        row, size = sequence.row, self.layout.page_size
        assert self.lens[row] == sequence.num_stored
        for position in range(sequence.num_cached, sequence.num_cached + count):
            before = self.read(row, position)
            value = (*before, sequence.tokens[position])
            self.computed += 1
            if position < self.lens[row]:
                assert sequence.rereads
                assert self.read(row, position + 1) == value
                continue
            if position % size == 0:
                self.tables[row].append(self.take())
            page = self.tables[row][position // size]
            assert self.refs[page] == 1, "a shared page is written"
            self.slots[page, position % size] = value
            self.lens[row] = position + 1

    def read(self, row, length):
        """The tokens of the first `length` slots of a row, as the last of them tells them."""
        size = self.layout.page_size
        tokens = ()
        for position in range(length):
            value = self.slots[self.tables[row][position // size], position % size]
            assert value[:-1] == tokens, "a page of another sequence"
            tokens = value
        return tokens

    def next_token(self, sequence):
        tokens = self.read(sequence.row, len(sequence.tokens))
        assert list(tokens) == sequence.tokens
        return expected_token(tokens, sequence.child)

    def check_finished(self, sequence):
        if len(sequence.tokens) == sequence.max_len:
            sequence.finish_reason = "length"
            self.done[sequence.age] = sequence
            self.release(self.scheduler.finish(sequence))

    def abort(self, sequence):
        row = self.scheduler.abort(sequence)
        if row is not None:
            self.release(row)

    def take(self):
        page = self.free.pop()
        assert self.refs[page] == 0
        self.refs[page] = 1
        return page

    def unref(self, page):
        self.refs[page] -= 1
        assert self.refs[page] >= 0
        if not self.refs[page]:
            self.free.append(page)
            for offset in range(self.layout.page_size):
                self.slots.pop((page, offset), None)

    def release(self, row):
        for page in self.tables[row]:
            self.unref(page)
        self.tables[row], self.lens[row] = [], 0

    def give_way(self, row):
        self.release(row)
        return len(self.free)

    def page_ids(self):
        table = np.zeros((self.config.max_seqs, self.layout.pages_for(self.config.max_model_len)), np.int32)
        for row, pages in self.tables.items():
            table[row, : len(pages)] = pages
        return table

    def check(self):
        scheduler, index = self.scheduler, self.scheduler.index
        held = Counter(page for pages in self.tables.values() for page in pages)
        named = [page.page_id for page in index._pages.values()]
        assert held + Counter(named) == +self.refs
        assert len(set(named)) == len(named)
        assert index.num_unused == sum(not held[page] for page in named)
        assert len(set(held) | set(named)) + len(self.free) == self.layout.num_pages - 1
        rows = [sequence.row for sequence in scheduler.running]
        assert sorted([*rows, *scheduler._free_rows]) == list(range(self.config.max_seqs))
        ages = [sequence.age for sequence in scheduler.running]
        assert ages == sorted(ages)
        assert all(sequence.row is None for sequence in scheduler.waiting)
        for page in index._pages.values():
            assert index.has(page.parent), "a chain with a gap"
        for sequence in scheduler.running:
            pages = self.tables[sequence.row]
            assert [page.page_id for page in sequence.named] == pages[: len(sequence.named)]


def expected_token(tokens, child):
    return (sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) + 3 * child + len(tokens)) % VOCAB


def expected(sequence):
    tokens = sequence.tokens[: sequence.prompt_len]
    while len(tokens) < sequence.max_len:
        tokens.append(expected_token(tuple(tokens), sequence.child))
    return tokens


def assert_right(machine):
    for sequence in machine.done.values():
        assert sequence.tokens == expected(sequence)
    assert not machine.scheduler.running
    assert len(machine.free) + machine.scheduler.index.num_unused == machine.layout.num_pages - 1


def test_first_come_first_served_and_decodes_beside_prompts():
    machine = Machine(num_pages=40, max_tokens_per_step=8)
    for length in (6, 5, 1):
        machine.add(list(range(length)), salt=str(length))
    plan = machine.scheduler.plan(39, machine.give_way)
    assert [(seq.request_id, count) for seq, count in plan.counts] == [(0, 6), (1, 2)]
    assert plan.is_prefill
    machine = Machine(num_pages=40, max_tokens_per_step=8)
    machine.add([1, 2])
    machine.step()
    machine.add([3] * 30)
    plan = machine.scheduler.plan(39, machine.give_way)
    assert [(seq.request_id, count) for seq, count in plan.counts] == [(0, 1), (1, 7)]


def test_admission_counts_the_copies_that_samples_will_make():
    machine = Machine(num_pages=12, max_tokens_per_step=32)
    machine.add([1] * 29, new=2)
    machine.step()
    machine.add([2] * 5, n=3)  # two pages, and two copies of the second; three are free
    plan = machine.scheduler.plan(len(machine.free), machine.give_way)
    assert [sequence.request_id for sequence, _ in plan.counts] == [0]


def test_nobody_overtakes_a_request_that_finds_no_room():
    machine = Machine(num_pages=7)
    for length in (10, 20, 1):
        machine.add([length % VOCAB] * length)
    machine.step()
    assert [sequence.request_id for sequence in machine.scheduler.running] == [0]
    machine.run()
    assert_right(machine)


def test_an_aligned_full_hit_takes_no_page_and_computes_one_token():
    machine = Machine(num_pages=30)
    machine.add([1, 2, 3, 4] * 2, new=1)
    machine.run()
    computed, free = machine.computed, list(machine.free)
    again = machine.add([1, 2, 3, 4] * 2, new=1)
    machine.run()
    assert machine.computed == computed + 1
    assert sorted(machine.free) == sorted(free)
    assert again.num_hit == 8
    assert_right(machine)


def test_two_equal_prompts_that_arrive_together_share():
    machine = Machine(num_pages=30, max_tokens_per_step=8)
    first, second, other = machine.add([1] * 14), machine.add([1] * 14), machine.add([2] * 5)
    machine.step()
    assert (first.num_cached, second.row) == (8, None), "the second waits for the first's pages"
    machine.run()
    assert (first.num_hit, second.num_hit, other.num_hit) == (0, 12, 0)
    assert_right(machine)


def test_a_request_that_must_not_read_the_cache_computes_all():
    machine = Machine(num_pages=30)
    machine.add([1, 2, 3, 4] * 2, new=1)
    machine.run()
    again = machine.add([1, 2, 3, 4] * 2, new=1, reads_cache=False)
    machine.run()
    assert again.num_hit == 0
    assert machine.computed == 16
    assert_right(machine)


def test_the_only_free_pages_are_the_matched_ones():
    """Nine of eleven pages are cached, and the request needs them and the rest: nothing that is matched is evicted."""
    machine = Machine(num_pages=12)
    machine.add(list(range(5)) * 7 + [0], new=1)
    machine.run()
    assert (machine.scheduler.index.num_unused, len(machine.free)) == (9, 2)
    again = machine.add(list(range(5)) * 7 + [0, 1, 1], new=2)
    machine.run()
    assert again.num_hit == 36
    assert machine.scheduler.index.evictions == 0
    assert_right(machine)


def test_samples_share_the_prompt_and_copy_the_partial_page_for_all_but_one():
    machine = Machine(num_pages=30, max_seqs=4)
    machine.add([1, 2, 3, 4, 1, 2], new=3, n=4)
    machine.step()
    assert len(machine.free) == 29 - 2
    machine.step()
    assert len(machine.free) == 29 - 1 - 4
    machine.run()
    assert len(machine.done) == 4
    assert machine.computed == 6 + 4 * 2
    assert_right(machine)


def test_samples_that_find_no_row_wait_as_requests_of_their_own():
    machine = Machine(num_pages=30, max_seqs=2)
    machine.add([1, 2, 3, 4, 1, 2], new=3, n=4)
    machine.run()
    assert sorted(machine.done) == [(0, child) for child in range(4)]
    assert_right(machine)


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
def test_samples_in_the_smallest_pool(prompt_len):
    machine = Machine(num_pages=1 + (prompt_len + 6 + 3) // 4, max_seqs=4)
    machine.add([1] * prompt_len, new=6, n=4)
    machine.run()
    assert len(machine.done) == 4
    assert_right(machine)


def test_the_newest_gives_way_and_finds_its_pages_again():
    machine = Machine(num_pages=12, max_seqs=2, max_model_len=40)
    old, new = machine.add([1] * 18, new=14), machine.add([2] * 8, new=14)
    machine.run()
    assert (old.num_preemptions, new.num_preemptions > 0) == (0, True)
    stats = machine.scheduler.prefix_stats
    assert stats.queried == 26, "what comes back is not counted as asked for the first time"
    assert stats.hit == 0
    assert stats.rehit > 0
    assert_right(machine)


def test_abort_in_every_state_leaks_nothing():
    machine = Machine(num_pages=12)
    sequences = [machine.add([number % VOCAB] * 7, new=9, n=2) for number in range(6)]
    for sequence in sequences[:4]:
        machine.step()
        if sequence.age not in machine.done:
            machine.abort(sequence)
    machine.run()
    assert_right(machine)


@pytest.mark.parametrize("num_pages", [7, 12, 40])
@pytest.mark.parametrize("page_size", [1, 4])
def test_soak(num_pages, page_size):
    """Requests of every kind come at random; whatever the pool, the tokens are those of each sequence alone."""
    rng = random.Random(num_pages * 10 + page_size)
    machine = Machine(num_pages=num_pages * (4 // page_size), page_size=page_size, max_model_len=24)
    heads = [[rng.randrange(VOCAB) for _ in range(length)] for length in (4, 8, 9, 12)]
    alive = []
    while machine.ids < 250:
        if rng.random() < 0.3:
            head = rng.choice(heads) if rng.random() < 0.7 else []
            prompt = head + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 7))]
            alive.append(machine.add(prompt, rng.randrange(1, 9), rng.choice([1, 1, 1, 2, 4]), rng.choice([None, "x"])))
        machine.step()
        if alive and rng.random() < 0.03:
            sequence = alive.pop(rng.randrange(len(alive)))
            if sequence.age not in machine.done and sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                machine.abort(sequence)
    machine.run()
    assert_right(machine)
    assert len(machine.done) > 250
    stats = machine.scheduler.prefix_stats
    assert 0 < stats.hit_rate < 1
    if num_pages == 7:
        assert machine.scheduler.num_preemptions > 20
        assert machine.scheduler.index.evictions > 20
