"""Where the versions of JAX differ (0.11.2 and 0.12)."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

if hasattr(plgpu, "store"):

    def store(ref: Any, value: Any) -> None:
        """Writes a small array to global memory, in whatever layout it has."""
        plgpu.store(ref, value, optimized=False)

else:

    def store(ref: Any, value: Any) -> None:
        """Writes a small array to global memory, in whatever layout it has."""
        ref[...] = value
