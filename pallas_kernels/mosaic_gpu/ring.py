"""A ring of shared-memory stages through which a sequence's keys and values stream.

One copy brings the keys and the values of one KV head and one page together: they lie side by side on the pool's last
axis. A stage holds a tile of keys, several copies; of a page longer than a tile, a copy brings a part. Of N stages, N - 1 are
in flight while one is read: after waiting for a tile, the stage read before it is released and started again.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu.target import Target

_TILE_BYTES: Final = 32 * 1024
_MIN_KEYS: Final = 64  # rows of a tensor-core product of four warps
_TWO_BLOCKS: Final = 200 * 1024  # shared memory that holds two blocks of three stages


def tile_keys(head_dim: int) -> int:
    """Keys of a tile: 32 KiB of 16-bit keys and values, or more."""
    return max(_MIN_KEYS, _TILE_BYTES // (2 * 2 * head_dim))


@dataclass(frozen=True)
class Ring:
    """Static shape of a ring.

    Attributes:
      target: the GPU.
      page_size: tokens of a page.
      head_dim: width of a head, as stored.
      dtype: of the pool.
    """

    target: Target
    page_size: int
    head_dim: int
    dtype: DTypeLike

    @property
    def stages(self) -> int:
        """Tiles that may be in flight."""
        return 3 if self.target.shared_memory >= _TWO_BLOCKS else 2

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return tile_keys(self.head_dim)

    @property
    def copy_keys(self) -> int:
        """Keys that one copy brings."""
        return min(self.page_size, self.keys)

    @property
    def copies(self) -> int:
        """Copies of a tile."""
        return self.keys // self.copy_keys

    def scratch(self) -> dict[str, Any]:
        """Scratch types: the buffer and, where barriers count the copies, one barrier a stage."""
        transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(self.dtype).itemsize)), plgpu.SwizzleTransform(128))
        buffer = plgpu.SMEM((self.stages, self.keys, 2 * self.head_dim), self.dtype, transforms=transforms)
        if not self.target.has_tma:
            return {"buffer": buffer}
        return {"buffer": buffer, "full": plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)}

    def start(self, scratch: Any, kv_pages: Any, rows: tuple[Any, ...], first_key: Any, head: Any, stage: Any) -> None:
        """Issues the copies of a tile.

        Args:
          scratch: the refs of `scratch()`.
          kv_pages: the pool's ref.
          rows: the pool's row of each copy.
          first_key: position of the tile's first key, a multiple of copy_keys.
          head: KV head.
          stage: where to.
        """
        lanes = 2 * self.head_dim
        within_page = pl.ds(pl.multiple_of(first_key % self.page_size, self.copy_keys), self.copy_keys)
        for i, row in enumerate(rows):
            keys = within_page if self.copy_keys < self.page_size else slice(None)
            source = kv_pages.at[row, keys, pl.ds(pl.multiple_of(head * lanes, lanes), lanes)]
            destination = scratch["buffer"].at[stage, pl.ds(i * self.copy_keys, self.copy_keys)]
            if self.target.has_tma:
                plgpu.copy_gmem_to_smem(source, destination, scratch["full"].at[stage])
            else:
                plgpu.copy_gmem_to_smem(source, destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, scratch: Any, stage: Any) -> None:
        """Blocks until the oldest tile started is in its stage; without barriers `stages - 1` must be in flight."""
        if self.target.has_tma:
            plgpu.barrier_wait(scratch["full"].at[stage])
        else:
            plgpu.wait_gmem_to_smem((self.stages - 2) * self.copies)

    def release(self) -> None:
        """Ends all reads so far: the stages read may be started again. Follows `wait`."""
        if self.target.has_tma:
            plgpu.commit_smem()
        # Else wait has synchronised the warpgroup, and cp.async writes are ordered like its own.
