"""A ring of shared-memory stages through which a sequence's keys and values stream.

One copy brings the keys and the values of one KV head and one page together: they lie side by side on the pool's last
axis. A stage holds a tile of keys, several copies; of a page longer than a tile, a copy brings a part. Of N stages,
N - 1 are in flight while one is read: after waiting for a tile, the stage read before it is released and refilled.

The tensor cores multiply 16-bit numbers: a tile of a quantised pool arrives as codes, which 16 bits hold exactly, and
is widened into one buffer beside the ring. For its scales see `pallas_kernels.mosaic_gpu.scales`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.mosaic_gpu import scales
from pallas_kernels.mosaic_gpu.target import Target
from pallas_kernels.quantisation import LARGEST

_WIDENED_LANES: Final = 128  # at once: a swizzled row of codes
_TWO_BLOCKS: Final = 200 * 1024  # shared memory that holds two blocks of three stages


def swizzled(dtype: np.dtype) -> tuple[Any, ...]:
    """How matrices lie in shared memory so that reading them causes no bank conflicts."""
    return plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]


@dataclass(frozen=True)
class Ring:
    """Static shape of a ring.

    Attributes:
      target: the GPU.
      stages: tiles that it holds, at least 2.
      keys: keys of a tile.
      page_size: tokens of a page.
      head_dim: width of a head, as stored.
      dtype: of the queries, of the products' operands.
      pool_dtype: of the pool: the same, or quantised.
    """

    target: Target
    stages: int
    keys: int
    page_size: int
    head_dim: int
    dtype: np.dtype
    pool_dtype: np.dtype

    @property
    def quantised(self) -> bool:
        return self.pool_dtype in LARGEST

    @property
    def copies_scales(self) -> bool:
        """Whether scales stream through the ring, too."""
        return self.quantised and scales.lie_where_copies_reach(self.target, self.page_size)

    @property
    def value_unit(self) -> float:
        """What a result over this ring must be divided by; see `Tile.value_scales`."""
        return LARGEST[self.pool_dtype] if self.quantised else 1.0

    @property
    def copy_keys(self) -> int:
        """Keys that one copy brings."""
        return min(self.page_size, self.keys)

    @property
    def copies(self) -> int:
        """Copies of a tile's keys and values."""
        return self.keys // self.copy_keys

    def scratch(self) -> dict[str, Any]:
        """Scratch types: the buffers and, where barriers count the copies, one barrier a stage."""
        tile = self.keys, 2 * self.head_dim
        types: dict[str, Any] = {
            "buffer": plgpu.SMEM((self.stages, *tile), self.pool_dtype, transforms=swizzled(self.pool_dtype))
        }
        if self.quantised:
            types["widened"] = plgpu.SMEM(tile, self.dtype, transforms=swizzled(self.dtype))
        if self.copies_scales:
            types["scales"] = plgpu.SMEM((self.stages, 2, self.keys), jnp.float32)
        if self.target.has_tma:
            arrivals = self.copies * (3 if self.copies_scales else 1)
            types["full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages)
        return types


def ring_for_two_blocks(target: Target, keys: int, dtype: np.dtype, kv_pages: Array, head_dim: int) -> Ring:
    """The ring with which two blocks of one warpgroup fit on a multiprocessor, or on small ones, one block.

    That takes tiles of 32 KiB in 16 bits. There are 3 stages (2 on small multiprocessors); what widening leaves of
    their bytes makes stages of 8 bits.
    """
    stages = 3 if target.shared_memory >= _TWO_BLOCKS else 2
    if kv_pages.dtype.itemsize == 1:
        stages = 2 * (stages - 1)
    return Ring(target, stages, keys, kv_pages.shape[1], head_dim, dtype, kv_pages.dtype)


class Tile(NamedTuple):
    """A tile in shared memory, as a step of the softmax takes it.

    Attributes:
      kv: ref of the keys and values, [keys, 2 * head_dim], 16 bits.
      first_key: position of the first key.
      key_scales: float32 [keys], None unless quantised; factors on the logits.
      value_scales: likewise for the values; factors on the weights. In units of 1 / `Ring.value_unit`, so that a weight
        times its scale is in the range of the weight times its values, which is that of the 16-bit dtype.
    """

    kv: Any
    first_key: Any
    key_scales: Any = None
    value_scales: Any = None

    def scale_logits(self, products: Any, axis: int) -> Any:
        """q k^T, the tile's keys along `axis`, from products with the keys as stored."""
        if self.key_scales is None:
            return products
        return products * lax.broadcast_in_dim(self.key_scales, products.shape, [axis])

    def scale_weights(self, weights: Any, visible: Any, axis: int) -> Any:
        """What to multiply the values as stored with; exactly zero where not visible, whatever the scales are there."""
        if self.value_scales is None:
            return weights
        weights = weights * lax.broadcast_in_dim(self.value_scales, weights.shape, [axis])
        return jnp.where(visible, weights, jnp.zeros_like(weights))


@dataclass(frozen=True)
class Stream:
    """The tiles of one block: a run of one sequence's keys, for one KV head.

    Attributes:
      ring: the static shape.
      scratch: the refs of `ring.scratch()`.
      kv_pages: the pool's ref.
      kv_scales: the scales' ref: the pool's, or with `Ring.copies_scales` false, by key; None unless quantised.
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
    kv_scales: Any
    block_tables: Any
    row_offset: Any
    seq: Any
    head: Any
    first_key: Any
    count: Any
    last_page: Any

    def fold(self, step: Callable[[Tile, Any], Any], carry: Any) -> Any:
        """Runs `carry = step(tile, carry)` over the tiles.

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
            return step(self._tile(tile, stage), carry), rows

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
            if ring.copies_scales:
                for part in range(2):
                    source = self.kv_scales.at[row, 2 * self.head + part, keys]
                    of_copy = pl.ds(i * ring.copy_keys, ring.copy_keys)
                    destination = self.scratch["scales"].at[self.stage(tile), part, of_copy]
                    plgpu.copy_gmem_to_smem(source, destination, barrier)

    def _tile(self, tile: Any, stage: Any) -> Tile:
        """The tile in a stage; codes are widened."""
        ring = self.ring
        codes, first_key = self.scratch["buffer"].at[stage], self.first_key + tile * ring.keys
        if not ring.quantised:
            return Tile(codes, first_key)
        if ring.copies_scales:
            by_key = self.scratch["scales"].at[stage]
        else:
            keys = pl.ds(pl.multiple_of(first_key, ring.copy_keys), ring.keys)
            by_key = self.kv_scales.at[self.seq, self.head, :, keys]
        key_scales, value_scales = (plgpu.load(by_key.at[part], optimized=False) for part in range(2))
        widened = self.scratch["widened"]
        for lane in range(0, 2 * ring.head_dim, _WIDENED_LANES):
            part = slice(None), pl.ds(lane, _WIDENED_LANES)
            numbers = plgpu.load(codes.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            if jnp.issubdtype(ring.pool_dtype, jnp.floating):
                numbers = numbers.astype(jnp.float32)  # as the hardware must, or by way of float16
            widened[part] = numbers.astype(ring.dtype)
        return Tile(widened, first_key, key_scales, value_scales * ring.value_unit)

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
