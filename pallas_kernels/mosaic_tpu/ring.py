"""The kernel's memory, and the copies of pages into its ring."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import work
from pallas_kernels.mosaic_tpu.sizes import LANES, NARROW, Sizes


class Memory(NamedTuple):
    """What the kernel reads pages from and keeps things in; the last three are None unless the pool is quantised.

    Attributes:
      pool: kv_pages, in HBM.
      ring: [slots, block_keys, lanes] blocks of keys and values.
      arrived: a DMA semaphore for each slot.
      cursor: item and block that is copied next, blocks whose copies were started, blocks computed on.
      acc: [num_kv_heads * rows, width] unnormalised output.
      peak: [num_kv_heads * rows, LANES] running maximum of the logits, the same in all lanes.
      total: [num_kv_heads * rows, LANES] running sum of the weights, spread over the lanes.
      pool_scales: kv_scales, in HBM.
      ring_scales: [slots, pages_per_block, 2 * num_kv_heads, page_size] the scales of the ring's pages.
      scales: [2 * num_kv_heads, block_keys] those of the block computed on, side by side; zeros for unowned slots.
    """

    pool: Any
    ring: Any
    arrived: Any
    cursor: Any
    acc: Any
    peak: Any
    total: Any
    pool_scales: Any = None
    ring_scales: Any = None
    scales: Any = None


NEXT_ITEM: Final = 0
NEXT_BLOCK: Final = 1
STARTED: Final = 2
DONE: Final = 3
"""Places in the cursor."""


def scratch(sizes: Sizes, pool_dtype: Any, *, quantised: bool) -> list[Any]:
    """Shapes of `Memory` without the pool's arrays, in its order."""
    rows, num_scales = sizes.num_kv_heads * sizes.rows, 2 * sizes.num_kv_heads
    shapes = [
        pltpu.VMEM((sizes.slots, sizes.block_keys, sizes.lanes), pool_dtype),
        pltpu.SemaphoreType.DMA((sizes.slots,)),
        pltpu.SMEM((4,), jnp.int32),
        pltpu.VMEM((rows, sizes.width), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
    ]
    of_scales = [
        pltpu.VMEM((sizes.slots, sizes.pages_per_block, num_scales, sizes.page_size), jnp.float32),
        pltpu.VMEM((num_scales, sizes.block_keys), jnp.float32),
    ]
    return shapes + of_scales if quantised else shapes


class Ring(NamedTuple):
    """Blocks of keys, and their copies. Block b of a sequence starts at its key b * block_keys.

    Attributes:
      sizes: static sizes.
      item: gives the fields of a work item.
      num_items: work items.
      row_offset: the layer's first row in the pool.
      pages_per_seq: width of the table.
      tables: the block tables, flat.
      memory: the kernel's.
    """

    sizes: Sizes
    item: Callable[[Array], work.Item]
    num_items: Array
    row_offset: Array
    pages_per_seq: int
    tables: Any
    memory: Memory

    def span(self, item: work.Item) -> tuple[Array, Array]:
        """The item's blocks: first, and past the last."""
        per_block = self.sizes.pages_per_block
        return item.first_page // per_block, (item.end_page + per_block - 1) // per_block

    def pages(self, item: work.Item, block: Array) -> tuple[Array, Array]:
        """The block's pages that are read, relative to its first: from, up to."""
        first = block * self.sizes.pages_per_block
        return jnp.maximum(item.first_page - first, 0), jnp.minimum(item.end_page - first, self.sizes.pages_per_block)

    def owned(self, item: work.Item, block: Array) -> tuple[Array, Array]:
        """The block's keys that are copied and that the item's last query may see: from, up to."""
        first = self.pages(item, block)[0] * self.sizes.page_size
        return first, item.position + item.end_row - block * self.sizes.block_keys

    def begin(self) -> None:
        """Starts the copies of the launch's first blocks."""
        cursor = self.memory.cursor
        cursor[NEXT_ITEM] = jnp.int32(0)
        cursor[NEXT_BLOCK] = self.span(self.item(jnp.int32(0)))[0]
        cursor[STARTED] = jnp.int32(0)
        cursor[DONE] = jnp.int32(0)
        lax.fori_loop(0, self.sizes.slots - 1, lambda _, __: self.start_next(), None)

    def start_next(self) -> None:
        """Starts the copies of the next block, if there is one, and moves the cursor past it."""
        cursor = self.memory.cursor
        index, block = cursor[NEXT_ITEM], cursor[NEXT_BLOCK]

        @pl.when(index < self.num_items)
        def start_block() -> None:
            item = self.item(index)
            slot = lax.rem(cursor[STARTED], jnp.int32(self.sizes.slots))
            column = item.seq * self.pages_per_seq + block * self.sizes.pages_per_block

            def start(page: Array) -> None:
                row = jnp.clip(self.tables[column + page] + self.row_offset, 0, self.memory.pool.shape[0] - 1)
                for copy in self._copies(slot, page, row):
                    copy.start()

            def start_all() -> None:
                for page in range(self.sizes.pages_per_block):
                    start(jnp.int32(page))

            self._by_wholeness(item, block, start_all, start)
            cursor[STARTED] += 1
            is_last = block + 1 >= self.span(item)[1]
            following = jnp.minimum(index + 1, self.num_items - 1)
            cursor[NEXT_ITEM] = jnp.where(is_last, index + 1, index)
            cursor[NEXT_BLOCK] = jnp.where(is_last, self.span(self.item(following))[0], block + 1)

    def wait(self, item: work.Item, block: Array) -> Array:
        """Waits for the oldest block, which is this one, and returns its slot; it is ready to compute on then."""
        memory = self.memory
        slot = lax.rem(memory.cursor[DONE], jnp.int32(self.sizes.slots))

        def wait(page: Array) -> None:
            for copy in self._copies(slot, page, jnp.int32(0)):
                copy.wait()

        def wait_for_all() -> None:
            for ring in (memory.ring, memory.ring_scales):
                if ring is not None:
                    pltpu.make_async_copy(ring.at[slot], ring.at[slot], memory.arrived.at[slot]).wait()

        self._by_wholeness(item, block, wait_for_all, wait)
        if memory.scales is None:
            self._clear(item, block, slot)
        else:
            self._gather_scales(item, block, slot)
        return slot

    def _by_wholeness(
        self, item: work.Item, block: Array, whole: Callable[[], None], each: Callable[[Array], None]
    ) -> None:
        """Runs `whole` if all pages of a block are read, the common case, or else `each` for those that are."""
        first, end = self.pages(item, block)
        is_whole = (first == 0) & (end == self.sizes.pages_per_block)
        pl.when(is_whole)(whole)
        pl.when(~is_whole)(lambda: lax.fori_loop(first, end, lambda page, _: each(page), None))

    def _page(self, slot: Array, page: Array) -> Any:
        rows = pl.ds(pl.multiple_of(page * self.sizes.page_size, self.sizes.page_size), self.sizes.page_size)
        return self.memory.ring.at[slot, rows]

    def _copies(self, slot: Array, page: Array, row: Array) -> list[Any]:
        """The copies that bring a row of the pool to page `page` of a slot."""
        memory = self.memory
        copies = [pltpu.make_async_copy(memory.pool.at[row], self._page(slot, page), memory.arrived.at[slot])]
        if memory.pool_scales is not None:
            to = memory.ring_scales.at[slot, page]
            copies.append(pltpu.make_async_copy(memory.pool_scales.at[row], to, memory.arrived.at[slot]))
        return copies

    def _clear(self, item: work.Item, block: Array, slot: Array) -> None:
        """Makes zeros of all that is not `owned` in a floating-point block: a weight of 0 times NaN would be NaN."""
        first, length = self.owned(item, block)
        rows = max(self.sizes.page_size, NARROW)  # at least a tile of packed bfloat16 rows

        def clear(group: Array, _: None) -> None:
            ref = self.memory.ring.at[slot, pl.ds(pl.multiple_of(group * rows, rows), rows)]
            key = group * rows + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
            is_owned = (key >= first) & (key < length)
            # Through float32: not every chip selects 16-bit values.
            ref[...] = jnp.where(is_owned, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)

        @pl.when((first > 0) | (length < self.sizes.block_keys))
        def clear_both_ends() -> None:
            lax.fori_loop(0, (first + rows - 1) // rows, clear, None)
            lax.fori_loop(jnp.maximum(length, first) // rows, self.sizes.block_keys // rows, clear, None)

    def _gather_scales(self, item: work.Item, block: Array, slot: Array) -> None:
        """Lays a quantised block's scales side by side, with zeros for all that is not `owned`."""
        first, length = self.owned(item, block)
        ring = self.memory.ring_scales
        found = jnp.concatenate([ring[slot, page] for page in range(self.sizes.pages_per_block)], axis=1)
        key = lax.broadcasted_iota(jnp.int32, found.shape, 1)
        self.memory.scales[...] = jnp.where((key >= first) & (key < length), found, 0.0)
