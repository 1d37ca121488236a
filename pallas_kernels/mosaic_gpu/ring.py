"""A ring of shared-memory stages through which a sequence's keys and values stream.

One copy brings the keys and the values of one KV head and one page together: they lie side by side on the pool's last
axis. A stage holds a tile of keys, several copies; of a page longer than a tile, a copy brings a part. Of N stages,
N - 1 are in flight while one is read: after waiting for a tile, the stage read before it is released and refilled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu.target import Target

_TILE_BYTES: Final = 32 * 1024
_MIN_KEYS: Final = 64
_TWO_BLOCKS: Final = 200 * 1024  # shared memory that holds two blocks of three stages


def keys_of_32_kib(head_dim: int) -> int:
    """Keys whose 16-bit keys and values take 32 KiB, but at least 64: the rows of a warpgroup's product."""
    return max(_MIN_KEYS, _TILE_BYTES // (2 * 2 * head_dim))


def stages_for_two_blocks(target: Target) -> int:
    """Stages of 32 KiB with which two blocks fit on a multiprocessor, or on small ones, one block of two stages."""
    return 3 if target.shared_memory >= _TWO_BLOCKS else 2


@dataclass(frozen=True)
class Ring:
    """Static shape of a ring.

    Attributes:
      target: the GPU.
      stages: tiles that it holds, at least 2.
      keys: keys of a tile.
      page_size: tokens of a page.
      head_dim: width of a head, as stored.
      dtype: of the pool.
    """

    target: Target
    stages: int
    keys: int
    page_size: int
    head_dim: int
    dtype: DTypeLike

    @property
    def copy_keys(self) -> int:
        """Keys that one copy brings."""
        return min(self.page_size, self.keys)

    @property
    def copies(self) -> int:
        """Copies of a tile."""
        return self.keys // self.copy_keys

    def transforms(self) -> tuple[Any, ...]:
        """How matrices lie in shared memory so that reading them causes no bank conflicts."""
        lanes = 128 // jnp.dtype(self.dtype).itemsize
        return plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]

    def scratch(self) -> dict[str, Any]:
        """Scratch types: the buffer and, where barriers count the copies, one barrier a stage."""
        shape = (self.stages, self.keys, 2 * self.head_dim)
        buffer = plgpu.SMEM(shape, self.dtype, transforms=self.transforms())
        if not self.target.has_tma:
            return {"buffer": buffer}
        return {"buffer": buffer, "full": plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)}


@dataclass(frozen=True)
class Stream:
    """The tiles of one block: a run of one sequence's keys, for one KV head.

    Attributes:
      ring: the static shape.
      scratch: the refs of `ring.scratch()`.
      kv_pages: the pool's ref.
      block_tables: the tables' ref.
      row_offset: the layer's first row.
      seq: the sequence.
      head: the KV head.
      first_key: position of the first tile's first key, a multiple of copy_keys.
      count: tiles; may be 0.
      last_page: the last page with a key that anyone may read, 0 if there is none.
    """

    ring: Ring
    scratch: Any
    kv_pages: Any
    block_tables: Any
    row_offset: Any
    seq: Any
    head: Any
    first_key: Any
    count: Any
    last_page: Any

    def fold(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Runs `carry = step(tile's buffer [keys, 2 * head_dim], position of its first key, carry)` over the tiles.

        One warpgroup copies, one tile ahead of the others' use, and computes.
        """
        ahead = self.ring.stages - 1
        for tile in range(ahead):
            self._start(jnp.int32(tile), self.rows(tile))

        def body(tile: Any, state: Any) -> Any:
            carry, rows = state
            stage = self.stage(tile)
            self._wait(stage)
            self._start(tile + ahead, rows)
            rows = self.rows(tile + ahead + 1)  # a step early: the table's latency hides behind this tile
            return step(self.scratch["buffer"].at[stage], self.first_key + tile * self.ring.keys, carry), rows

        carry, _ = lax.fori_loop(0, self.count, body, (carry, self.rows(ahead)))
        if not self.ring.target.has_tma:
            plgpu.wait_gmem_to_smem(0)
        return carry

    def stage(self, tile: Any) -> Any:
        return lax.rem(tile, jnp.int32(self.ring.stages))

    def rows(self, tile: Any) -> tuple[Any, ...]:
        """The pool's row of each copy of a tile. Past the end the last page stands in: its keys are masked."""
        ring = self.ring
        first = self.first_key + tile * ring.keys
        pages = [(first + i * ring.copy_keys) // ring.page_size for i in range(ring.copies)]
        rows = [self.block_tables[self.seq, jnp.minimum(page, self.last_page)] + self.row_offset for page in pages]
        return tuple(jnp.clip(row, 0, self.kv_pages.shape[0] - 1) for row in rows)

    def copy(self, tile: Any, rows: tuple[Any, ...], barrier: Any) -> None:
        """Issues the copies of a tile into its stage; each arrives at the barrier (None without TMA)."""
        ring = self.ring
        lanes = pl.ds(pl.multiple_of(self.head * (2 * ring.head_dim), 2 * ring.head_dim), 2 * ring.head_dim)
        keys: Any = slice(None)
        if ring.copy_keys < ring.page_size:
            within = (self.first_key + tile * ring.keys) % ring.page_size
            keys = pl.ds(pl.multiple_of(within, ring.copy_keys), ring.copy_keys)
        for i, row in enumerate(rows):
            source = self.kv_pages.at[row, keys, lanes]
            destination = self.scratch["buffer"].at[self.stage(tile), pl.ds(i * ring.copy_keys, ring.copy_keys)]
            if ring.target.has_tma:
                plgpu.copy_gmem_to_smem(source, destination, barrier)
            else:
                plgpu.copy_gmem_to_smem(source, destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def _start(self, tile: Any, rows: tuple[Any, ...]) -> None:
        if self.ring.target.has_tma:
            pl.when(tile < self.count)(lambda: self.copy(tile, rows, self.scratch["full"].at[self.stage(tile)]))
        else:
            self.copy(tile, rows, None)  # _wait counts copies, so that every tile must have its own

    def _wait(self, stage: Any) -> None:
        """Blocks until the oldest tile in flight is in its stage, and ends all reads of the one before it."""
        if self.ring.target.has_tma:
            plgpu.barrier_wait(self.scratch["full"].at[stage])
            plgpu.commit_smem()
        else:
            plgpu.wait_gmem_to_smem((self.ring.stages - 2) * self.ring.copies)  # a warpgroup barrier, too
