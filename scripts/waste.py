"""Where a KV cache's memory goes while requests run: simulations without a model.

Requests come from a queue that never runs dry while it is measured, first come first served; a request enters as soon
as it fits. In step k of its life it holds its prompt and k tokens of its answer. The contiguous caches take what they
reserve from a buddy allocator; paging runs this package's page pool and block tables, and like the engine leaves 1 % of
the pages free at an admission and, when pages run out, sends the newest request back to the queue with its tokens.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array

from paged_jax import block_tables, page_pool
from paged_jax.block_tables import BlockTables
from paged_jax.layout import ceil_div
from paged_jax.page_pool import PagePool
from scripts.buddy import Buddy
from scripts.lengths import Lengths

_TRANSIENT = 0.1  # share of the requests that end before measuring begins: at first all start together
_WATERMARK = 0.01


@dataclass(frozen=True)
class Waste:
    """What a cache's slots hold, averaged over the steps: shares of all slots, which add up to 1.

    Attributes:
      tokens: tokens.
      reserved: nothing yet, but the request that has the slot will use it.
      internal: nothing ever: the request that has the slot ends before.
      external: nothing, because of where the free slots lie: what a block is larger than was asked for, and free
        slots as long as together they are as many as the next request asks for.
      free: nothing, and the next request asks for more than all that is left.
      sequences: running at once.
      preemptions: requests sent back to the queue.
    """

    tokens: float
    reserved: float
    internal: float
    external: float
    free: float
    sequences: float
    preemptions: int = 0


class _Average:
    """Sums slots over steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums = np.zeros(6)

    def add(self, steps: int, *sums: float) -> None:
        """Tokens, reserved, internal, external, free and sequences, each summed over so many steps."""
        self._steps += steps
        self._sums += sums

    def waste(self, num_slots: int, preemptions: int = 0) -> Waste:
        """The shares.

        Raises:
          ValueError: nothing was measured.
        """
        if not self._steps:
            raise ValueError("all requests fit at once; give more of them, or fewer slots")
        means = (self._sums / self._steps).tolist()
        tokens, reserved, internal, external, free = (mean / num_slots for mean in means[:-1])
        return Waste(tokens, reserved, internal, external, free, means[-1], preemptions)


def contiguous(requests: Sequence[Lengths], asked: Callable[[Lengths], int], *, num_slots: int) -> Waste:
    """A contiguous block a request, for its whole life.

    Args:
      requests: the queue.
      asked: slots that a request asks for, at least its prompt and output.
      num_slots: slots of the cache.

    Raises:
      ValueError: a request asks for more than the largest block, or none ever waits.
    """
    memory, queue, average = Buddy(num_slots), deque(requests), _Average()
    running: list[tuple[int, int, int, Lengths]] = []  # end, start of the block, step of admission, lengths
    now = num_ended = 0
    while True:
        while queue and (start := memory.allocate(asked(queue[0]))) is not None:
            heapq.heappush(running, (now + queue[0].output, start, now, queue.popleft()))
        if not queue:
            return average.waste(num_slots)
        if not running:
            raise ValueError(f"a request asks for {asked(queue[0])} contiguous slots of {num_slots}; give more slots")
        steps = running[0][0] - now
        if num_ended >= _TRANSIENT * len(requests):
            tokens = sum(
                steps * (request.prompt + now - admitted) + steps * (steps + 1) // 2
                for _, _, admitted, request in running
            )
            final, wanted, taken = (
                steps * sum(sizes)
                for sizes in zip(
                    *((request.total, asked(request), memory.block_size(at)) for _, at, _, request in running),
                    strict=True,
                )
            )
            free, rounded = steps * memory.num_free, taken - wanted
            external, free = (free, 0) if memory.num_free >= asked(queue[0]) else (0, free)
            average.add(steps, tokens, final - tokens, wanted - final, rounded + external, free, steps * len(running))
        now += steps
        while running and running[0][0] == now:
            memory.release(heapq.heappop(running)[1])
            num_ended += 1


def paged(requests: Sequence[Lengths], *, num_slots: int, page_size: int, max_len: int, max_seqs: int) -> Waste:
    """Pages as the requests grow.

    Args:
      requests: the queue.
      num_slots: slots of the cache; the null page takes some of them and counts as internal waste.
      page_size: tokens a page.
      max_len: longest request.
      max_seqs: sequences at once.

    Raises:
      ValueError: a request has more tokens than the pool, or none ever waits.
    """
    pool = page_pool.create(num_slots // page_size)
    tables = block_tables.create(max_seqs, ceil_div(max_len, page_size))
    longest = max(request.total for request in requests)
    if ceil_div(longest, page_size) > pool.num_pages - 1:
        raise ValueError(f"a request of {longest} tokens does not fit {pool.num_pages - 1} pages of {page_size}")
    grow = jax.jit(partial(_grow, page_size=page_size, num_tokens=num_slots))
    release = jax.jit(block_tables.release)

    watermark, average = int(_WATERMARK * (pool.num_pages - 1)), _Average()
    queue, running = deque(requests), dict[int, Lengths]()  # rows in the order of their age, and what they will hold
    lens, ends = np.zeros(max_seqs, np.int32), np.zeros(max_seqs, np.int32)
    free_rows = list(range(max_seqs))
    num_free, num_ended, preemptions = pool.num_pages - 1, 0, 0
    while True:
        while (growing := int(np.sum(lens[list(running)] % page_size == 0))) > num_free:
            row, request = running.popitem()
            queue.appendleft(Lengths(int(lens[row]), request.total - int(lens[row])))
            preemptions += 1
            tables, pool, num_free = _released(release, tables, pool, [row])
            lens[row] = 0
            free_rows.append(row)
        counts = np.zeros(max_seqs, np.int32)
        counts[list(running)] = 1
        while queue and free_rows:
            growing += ceil_div(queue[0].prompt + 1, page_size)
            if growing + (watermark if running else 0) > num_free:
                break
            row = free_rows.pop()
            running[row] = queue.popleft()
            counts[row], ends[row] = running[row].prompt + 1, running[row].total
        if not queue:
            return average.waste(num_slots, preemptions)
        tables, pool, ok = grow(tables, pool, counts)
        assert ok, "more was admitted than the pool holds"
        lens += counts
        num_free = int(pool.num_free)
        if num_ended >= _TRANSIENT * len(requests):
            tokens, free = int(lens.sum()), num_free * page_size
            average.add(1, tokens, 0, num_slots - tokens - free, 0, free, len(running))
        ended = [row for row in running if lens[row] == ends[row]]
        if ended:
            tables, pool, num_free = _released(release, tables, pool, ended)
            lens[ended] = 0
            free_rows += ended
            num_ended += len(ended)
            for row in ended:
                del running[row]


def _grow(
    tables: BlockTables, pool: PagePool, counts: Array, *, page_size: int, num_tokens: int
) -> tuple[BlockTables, PagePool, Array]:
    tables, pool, _, _, ok = block_tables.append(tables, pool, counts, page_size=page_size, num_tokens=num_tokens)
    return tables, pool, ok


def _released(
    release: Callable[..., tuple[BlockTables, PagePool]], tables: BlockTables, pool: PagePool, rows: list[int]
) -> tuple[BlockTables, PagePool, int]:
    mask = np.zeros(tables.seq_lens.shape[0], bool)
    mask[rows] = True
    tables, pool = release(tables, pool, mask)
    return tables, pool, int(pool.num_free)
