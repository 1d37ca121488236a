"""Where a kernel that is traced now will run. The one module that asks JAX's private configuration."""

from typing import Final

import jax
from jax._src.config import pallas_tpu_interpret_mode_context_manager

INTERPRETED_VMEM: Final = 128 * 2**20
"""VMEM assumed where no chip says: that of a v5e or v6e core."""


def interpreted() -> bool:
    """Whether `pltpu.force_tpu_interpret_mode` or `set_tpu_interpret_mode` is on."""
    return pallas_tpu_interpret_mode_context_manager.value is not None


def platform() -> str:
    """The platform compiled for: that of the abstract mesh's device where one is set, else the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def vmem_bytes() -> int:
    """VMEM of one core of the chip compiled for."""
    from jax.experimental.pallas import tpu as pltpu

    return INTERPRETED_VMEM if interpreted() else pltpu.get_tpu_info().vmem_capacity_bytes
