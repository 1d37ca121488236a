"""Simulated waste against plain step-by-step models; the published figures; the command."""

import json
import random
from collections import deque

import numpy as np
import pytest

from scripts import fragmentation, sharing, waste
from scripts.buddy import Buddy
from scripts.lengths import ALPACA, SHAREGPT, Lengths
from tests.scripts.refusals import assert_refused


@pytest.mark.parametrize("size", [64, 100, 1])
def test_buddy_blocks_are_aligned_apart_and_merge_again(size):
    rng, memory = random.Random(size), Buddy(size)
    taken = {}
    for _ in range(400):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            memory.release(start)
            del taken[start]
        else:
            wanted = rng.randint(1, max(1, size // 3))
            start = memory.allocate(wanted)
            if start is not None:
                block = memory.block_size(start)
                assert wanted <= block < 2 * wanted
                assert start % block == 0
                assert start + block <= size
                taken[start] = block
        slots = [slot for start, block in taken.items() for slot in range(start, start + block)]
        assert len(slots) == len(set(slots)) == size - memory.num_free
    for start in taken:
        memory.release(start)
    largest = 1 << (size.bit_length() - 1)
    assert memory.allocate(largest) == 0
    assert memory.num_free == size - largest
    assert memory.allocate(size) is None


def requests_of(seed, count, longest):
    rng = random.Random(seed)
    return [Lengths(rng.randint(1, longest), rng.randint(1, longest)) for _ in range(count)]


def test_contiguous_counts_as_one_would_step_by_step():
    requests, num_slots = requests_of(0, 60, 20), 150

    def asked(request):
        return request.prompt + 2 * request.output

    memory, queue, running, ended, rows = Buddy(num_slots), deque(requests), [], 0, []
    while True:
        while queue and (start := memory.allocate(asked(queue[0]))) is not None:
            running.append([start, queue.popleft(), 0])
        if not queue:
            break
        for entry in running:
            entry[2] += 1
        if ended >= 6:
            tokens = sum(request.prompt + age for _, request, age in running)
            reserved = sum(request.output - age for _, request, age in running)
            internal = sum(request.output for _, request, _ in running)
            external = sum(memory.block_size(start) - asked(request) for start, request, _ in running)
            free = memory.num_free
            if free >= asked(queue[0]):
                external, free = external + free, 0
            rows.append([tokens, reserved, internal, external, free, len(running) * num_slots])
        for entry in [entry for entry in running if entry[2] == entry[1].output]:
            running.remove(entry)
            memory.release(entry[0])
            ended += 1
    got = waste.contiguous(requests, asked, num_slots=num_slots)
    expected = np.mean(rows, axis=0) / num_slots
    assert expected[3] > 0.1
    np.testing.assert_allclose(
        [got.tokens, got.reserved, got.internal, got.external, got.free, got.sequences], expected, rtol=1e-12
    )


def test_paged_counts_as_one_would_with_plain_numbers():
    """Pages are counted by lengths alone; the allocator must come to the same, preemptions included."""
    requests, page_size, num_slots, max_seqs = requests_of(1, 60, 30), 4, 160, 5
    pages, queue, running, ended, preempted, rows = num_slots // page_size - 1, deque(requests), [], 0, 0, []

    def taken():
        return sum(-(-length // page_size) for length, _ in running)

    while True:
        while sum(length % page_size == 0 for length, _ in running) > pages - taken():
            length, end = running.pop()
            queue.appendleft(Lengths(length, end - length))
            preempted += 1
        needed = sum(length % page_size == 0 for length, _ in running)
        admitted = []
        while queue and len(running) + len(admitted) < max_seqs:
            needed += -(-(queue[0].prompt + 1) // page_size)
            if needed > pages - taken():  # 1 % of 39 pages is none
                break
            admitted.append([queue[0].prompt, queue.popleft().total])
        if not queue:
            break
        running += admitted
        for entry in running:
            entry[0] += 1
        if ended >= 6:
            tokens, free = sum(length for length, _ in running), (pages - taken()) * page_size
            rows.append([tokens, num_slots - tokens - free, free, len(running) * num_slots])
        ended += sum(length == end for length, end in running)
        running = [entry for entry in running if entry[0] != entry[1]]
    got = waste.paged(requests, num_slots=num_slots, page_size=page_size, max_len=60, max_seqs=max_seqs)
    expected = np.mean(rows, axis=0) / num_slots
    np.testing.assert_allclose([got.tokens, got.internal, got.free, got.sequences], expected, rtol=1e-12)
    assert got.preemptions == preempted > 0
    assert got.reserved == got.external == 0


SHARED = [Lengths(5, 9), Lengths(8, 3), Lengths(2, 12)]


def sharing_of(page_size):
    return sharing.Sharing(SHARED, page_size=page_size, max_width=3, max_prefix=10)


@pytest.mark.parametrize(("n", "beams"), [(1, False), (3, False), (3, True)])
def test_sharing_saves_what_equal_pasts_allow(n, beams):
    """Tokens get a number each, forks copy the lists; a page is shared where all up to its end is the same."""
    requests, size, seed = SHARED, 4, 3
    rng = np.random.default_rng(seed)
    first, rows = np.repeat(np.arange(3) * n, n), 3 * n
    outputs = np.repeat([request.output for request in requests], n)
    others = first + rng.integers(0, n, (outputs.max(), rows))
    parents = np.where(rng.random(others.shape) < sharing.REPLACED, others, np.arange(rows))
    past = [[(row // n, i) for i in range(requests[row // n].prompt)] for row in range(rows)]
    live = alone = 0
    for step in range(outputs.max()):
        if beams:
            past = [list(past[parents[step, row]]) for row in range(rows)]
        past = [[*past[row], (row, step, "new")] if step < outputs[row] else [] for row in range(rows)]
        live += len({(start, *tokens[: start + size]) for tokens in past for start in range(0, len(tokens), size)})
        alone += sum(-(-len(tokens) // size) for tokens in past)
    assert sharing_of(size).samples(n, beams=beams, seed=seed) == 1 - live / alone
    assert (live < alone) == (n > 1)


def test_prefixes_share_their_full_pages():
    requests, size, length = SHARED, 4, 10
    live = alone = 0
    for step in range(12):
        lens = [length + request.prompt + step + 1 for request in requests if step < request.output]
        alone += sum(-(-n // size) for n in lens)
        live += 2 + sum(-(-n // size) - 2 for n in lens)
    assert sharing_of(size).prefix(length) == 1 - live / alone


def test_published_shares():
    """Ordering as published, pages within 3 points; short sequences waste more of their last pages."""
    slots = 15_728

    def paged(load, count):
        requests = load.draw(count, max_len=2048, seed=0)
        return requests, waste.paged(requests, num_slots=slots, page_size=16, max_len=2048, max_seqs=256)

    requests, result = paged(SHAREGPT, 300)
    shares = [100 * result.tokens]
    for asked in (lambda r: r.total, lambda r: r.prompt + (1 << (r.output - 1).bit_length()), lambda r: 2048):
        shares.append(100 * waste.contiguous(requests, asked, num_slots=slots).tokens)
    assert shares == sorted(shares, reverse=True)
    assert abs(shares[0] - fragmentation.PUBLISHED["paged"]) < 3
    _, short = paged(ALPACA, 1000)
    rates = [r.internal / (r.tokens + r.internal) for r in (result, short)]
    assert rates[0] < 0.035
    assert 0.08 < rates[1] < 0.12


@pytest.mark.parametrize(("load", "means"), [(SHAREGPT, (161, 338)), (ALPACA, (19, 58))])
def test_made_lengths(load, means):
    requests = load.draw(2000, max_len=2048, seed=1)
    assert requests == load.draw(2000, max_len=2048, seed=1)
    np.testing.assert_allclose(np.mean(requests, axis=0), means, rtol=0.01)
    assert np.min(requests) >= 1
    assert max(request.total for request in requests) <= 2048


@pytest.fixture
def run(capsys):
    def run(*args):
        status = fragmentation.main([str(arg) for arg in args])
        return (status, *capsys.readouterr())

    return run


def test_the_command_on_lengths_of_ones_own(run, tmp_path):
    lengths, results, picture = (tmp_path / name for name in ("own.jsonl", "out.json", "out.png"))
    lines = [json.dumps({"prompt_tokens": 3 + i % 5, "output_tokens": 2 + i % 7}) for i in range(40)]
    lengths.write_text("\n".join(lines))
    small = ("--num-slots", 128, "--max-len", 32, "--page-size", 4, "--max-seqs", 8)
    status, out, err = run("--lengths", lengths, *small, "--json", results, "--plot", picture)
    assert (status, err) == (0, "")
    assert "own.jsonl | paged" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(results.read_text())
    assert [row["cache"] for row in written["waste"]] == ["max", "powers of two", "oracle", "paged"]
    for row in written["waste"]:
        assert sum(row[f"{kind} %"] for kind in fragmentation.KINDS) == pytest.approx(100)
        assert row["published tokens %"] == ""
    assert len(written["sharing"]) == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: not JSON"),
        ('{"prompt_tokens": 3}', 'line 1: must be {"prompt_tokens": 161, "output_tokens": 338}, each at least 1'),
        ('{"prompt_tokens": 3, "output_tokens": true}', "line 1: must be"),
        (
            '{"prompt_tokens": 30, "output_tokens": 3}',
            "line 1: 33 tokens are more than max_len = 32",
        ),
        ("", "holds no request"),
    ],
)
def test_bad_lengths(run, tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text(line + "\n")
    assert_refused(run("--lengths", path, "--max-len", 32), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", 0], "--requests must be at least 1, got 0"),
        (["--requests", 10], "all requests fit at once; give more of them, or fewer slots"),
        (["--num-slots", 2000], "a request asks for 2048 contiguous slots of 2000; give more slots"),
        (["--plot", "no/such/picture.png"], "cannot write no/such/picture.png"),
        (["--max-len", "x"], "argument --max-len: invalid int value: 'x'"),
    ],
)
def test_bad_arguments(run, arguments, message):
    status, _, err = run(*arguments)
    assert_refused((status, "", err), message)
