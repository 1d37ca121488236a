"""The static geometry of a paged cache, and (with `pallas_kernels`) the only knowledge of its axis order."""

from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32, Num

from pallas_kernels import QUANTISED_DTYPES

NULL_PAGE: Final = 0
"""The page that pads block tables: never allocated, never read as data."""

_MAX_SLOTS: Final = 2**31 - 1


@dataclass(frozen=True)
class KVLayout:
    """Where keys and values lie: `kv_pages[num_layers * num_pages, page_size, num_kv_heads * 2 * padded_head_dim]`.

    Layer `l`'s page `p` is row `l * num_pages + p`: the layer is one more level of the page table, so nothing slices
    the pool. On the last axis each KV head holds its key and then its value.

    A quantised pool (int8, float8_e4m3fn) has a float32 scale for each key and value beside it:
    `kv_scales[num_layers * num_pages, num_kv_heads * 2, page_size]`, keys of head h at 2h and values at 2h + 1.

    Attributes:
      num_layers: attention layers that share a block table.
      num_pages: pages of one layer, the null page included; `num_pages - 1` can be allocated.
      page_size: tokens a page.
      num_kv_heads: key/value heads.
      head_dim: width of a head as the model sees it.
      padded_head_dim: width as stored, at least head_dim; the rest is zeros. 0 stands for head_dim.
      dtype: of the pool; floating-point, or int8 or float8_e4m3fn for a quantised one.

    Raises:
      ValueError: a size is out of range, or the slots cannot be counted in int32.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    padded_head_dim: int = 0
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_pages < 2:
            raise ValueError(
                f"num_pages must be at least 2 (page {NULL_PAGE} is the null page and holds no tokens), "
                f"got {self.num_pages}"
            )
        object.__setattr__(self, "padded_head_dim", self.padded_head_dim or self.head_dim)
        if self.padded_head_dim < self.head_dim:
            raise ValueError(f"padded_head_dim must be at least head_dim = {self.head_dim}, got {self.padded_head_dim}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not self.is_quantised and not jnp.issubdtype(self.dtype, jnp.floating):
            allowed = " or ".join(map(str, QUANTISED_DTYPES))
            raise ValueError(f"dtype must be a floating-point dtype, or quantised ({allowed}), got {self.dtype}")
        if self.num_layers * self.num_pages * self.page_size > _MAX_SLOTS:
            raise ValueError(
                f"num_layers * num_pages * page_size must stay below 2**31, got {self.num_layers} * {self.num_pages} * "
                f"{self.page_size}; take fewer pages"
            )

    @property
    def pages_shape(self) -> tuple[int, int, int]:
        """Shape of `kv_pages`."""
        return (
            self.num_layers * self.num_pages,
            self.page_size,
            self.num_kv_heads * 2 * self.padded_head_dim,
        )

    @property
    def is_quantised(self) -> bool:
        """Whether the pool holds 8-bit codes with scales."""
        return self.dtype in QUANTISED_DTYPES

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """Shape of a quantised pool's `kv_scales`."""
        return (self.num_layers * self.num_pages, self.num_kv_heads * 2, self.page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes, over all layers, padding and scales included."""
        scale_bytes = np.dtype(jnp.float32).itemsize if self.is_quantised else 0
        head_bytes = self.padded_head_dim * np.dtype(self.dtype).itemsize + scale_bytes
        return self.num_layers * self.num_kv_heads * 2 * head_bytes

    @property
    def bytes_per_page(self) -> int:
        """Bytes one page takes, over all layers, padding and scales included."""
        return self.page_size * self.bytes_per_token

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, the null page included."""
        return self.num_pages * self.bytes_per_page

    @property
    def padding_bytes(self) -> int:
        """Bytes of the pool that only pad the head dimension."""
        vectors = self.num_layers * self.num_pages * self.page_size * self.num_kv_heads * 2
        return vectors * (self.padded_head_dim - self.head_dim) * np.dtype(self.dtype).itemsize

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens takes."""
        return ceil_div(num_tokens, self.page_size)

    def row_offset(self, layer: int | Int32[Array, ""]) -> int | Int32[Array, ""]:
        """The first row of a layer; `layer` may be traced."""
        return layer * self.num_pages

    def rows_of_page(self, page_id: Int32[Array, ""]) -> Int32[Array, " num_layers"]:
        """The rows that hold one page, one a layer."""
        return jnp.arange(self.num_layers, dtype=jnp.int32) * self.num_pages + page_id

    def pad_heads(self, x: Float[Array, "*n head_dim"]) -> Float[Array, "*n padded"]:
        """Widens the last axis from head_dim to padded_head_dim with zeros."""
        if self.padded_head_dim == self.head_dim:
            return x
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.padded_head_dim - self.head_dim)])

    def split_kv(self, rows: Num[Array, "*n lanes"]) -> tuple[Num[Array, "*n h d"], Num[Array, "*n h d"]]:
        """Parts the last axis of pool rows into keys and values `[..., num_kv_heads, head_dim]`."""
        kv = rows.reshape(*rows.shape[:-1], self.num_kv_heads, 2, self.padded_head_dim)[..., : self.head_dim]
        return kv[..., 0, :], kv[..., 1, :]

    def split_scales(
        self, rows: Float32[Array, "*n num_scales page_size"]
    ) -> tuple[Float32[Array, "*n page_size h"], Float32[Array, "*n page_size h"]]:
        """Parts rows of `kv_scales` into the scales of keys and of values, [..., page_size, num_kv_heads]."""
        scales = jnp.moveaxis(rows, -1, -2)
        return scales[..., 0::2], scales[..., 1::2]


def ceil_div[T: (int, Array, np.ndarray)](a: T, b: int) -> T:
    """Pages for `a` tokens with `b` tokens a page: a / b rounded up."""
    return -(-a // b)
