"""The attention operation over paged keys and values; imports jax and numpy only.

`paged_attention` and `write_kv` are the whole public surface. Which implementation computes them is chosen by
the platform or by name; all of them obey the contract written in `pallas_kernels.api`.
"""

from pallas_kernels.api import IMPLEMENTATIONS, default_implementation, paged_attention, write_kv
from pallas_kernels.quantisation import QUANTISED_DTYPES

__all__ = ["IMPLEMENTATIONS", "QUANTISED_DTYPES", "default_implementation", "paged_attention", "write_kv"]
