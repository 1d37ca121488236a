"""The GPU that a kernel is traced for; the one module that asks JAX for it."""

from dataclasses import dataclass
from typing import Any, Final

import jax
from jax._src import config as _private_config  # interpret mode has no public getter


@dataclass(frozen=True)
class Target:
    """What the kernels' shapes depend on.

    Attributes:
      capability: compute capability, (9, 0) for Hopper.
      num_sms: streaming multiprocessors.
      shared_memory: bytes of shared memory that one block may use.
      has_tma: whether copies to shared memory are issued by one thread and counted by a barrier (sm_90 and later);
        before, every thread copies with cp.async and waits for its own copies.
    """

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether a warpgroup multiplies matrices in shared memory (sm_90 alone)."""
        return self.capability == (9, 0)


# NVIDIA, CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_SHARED_MEMORY: Final = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}

CAPABILITIES: Final = tuple(_SHARED_MEMORY)
"""Compute capabilities that the kernels compile for."""

_INTERPRETED: Final = Target((9, 0), num_sms=1, shared_memory=_SHARED_MEMORY[9, 0])


def interpreting() -> bool:
    """Whether Pallas kernels are interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    return _private_config.pallas_tpu_interpret_mode_context_manager.value is not None


def _device() -> Any:
    """The device that is compiled for: the abstract mesh's, or else the default one."""
    default = jax.devices()[0]
    device = jax.sharding.get_abstract_mesh().abstract_device
    # A mesh of real devices describes them without their compute capability.
    return default if device is None or device.device_kind == default.device_kind else device


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that is compiled for; None if that is no NVIDIA GPU."""
    device = _device()
    if device.platform not in ("gpu", "cuda"):
        return None
    major, _, minor = getattr(device, "compute_capability", "9.0").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def current() -> Target:
    """The target of the trace in progress; interpreted kernels take Hopper's form."""
    if interpreting():
        return _INTERPRETED
    found = capability()
    assert found in _SHARED_MEMORY, f"check() lets only {CAPABILITIES} through, got {found}"
    device = _device()
    num_sms = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 132
    return Target(found, num_sms, _SHARED_MEMORY[found])
