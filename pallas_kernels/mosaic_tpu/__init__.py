"""The TPU implementation: one Pallas kernel for decode, prefill and batches that mix them.

`ragged` holds the kernel, `work` what it is told to do, `support` what it takes. Pallas is imported on first use: its
import takes longer than that of this package.
"""

from typing import Any

from jax import Array

from pallas_kernels.mosaic_tpu.support import check

__all__ = ["check", "paged_attention"]


def paged_attention(*operands: Array | None, **static: Any) -> tuple[Array, Array]:
    """See `pallas_kernels.mosaic_tpu.ragged.paged_attention`."""
    from pallas_kernels.mosaic_tpu import ragged

    return ragged.paged_attention(*operands, **static)
