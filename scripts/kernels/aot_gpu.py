"""Compiling for a GPU that is not here: the CUDA plugin's compiler needs neither driver nor device.

Install `jax-cuda13-plugin` and `jax-cuda13-pjrt` of JAX's version, nothing else of NVIDIA's. A process compiles for one
chip: ptxas fails on a second one.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from scripts.kernels import aot

ENVIRONMENT: Final = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""What a process that compiles must have been started with."""


class Chip(NamedTuple):
    """Sizes of NVIDIA's documents (CUDA C++ Programming Guide, compute capabilities; data sheets)."""

    capability: str
    num_sms: int
    shared_memory_per_sm: int
    shared_memory_per_block: int


CHIPS: Final = {
    "sm_80": Chip("8.0", 108, 167_936, 166_912),
    "sm_89": Chip("8.9", 142, 102_400, 101_376),
    "sm_90": Chip("9.0", 132, 233_472, 232_448),
    "sm_100": Chip("10.0", 148, 233_472, 232_448),
    "sm_120": Chip("12.0", 188, 102_400, 101_376),
}


class Resources(NamedTuple):
    """What one kernel takes: registers of a thread, bytes spilled (stores + loads), bytes of shared memory a block."""

    registers: int
    spilled: int
    shared_memory: int


def missing_compiler() -> str | None:
    """Why nothing can be compiled, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    return None


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> Any:
    """`function` compiled for a chip, a key of CHIPS; one chip a process. See `aot.compile_on`."""
    aot.check_environment(ENVIRONMENT)
    sizes = CHIPS[chip]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=chip, topology="1x1x1", target_config=_target_config(sizes)
    )
    mesh = AbstractMesh((), (), abstract_device=_device(chip))
    return aot.compile_on(topology.devices[0], mesh, function, *arguments, **jit_options)


def dump_environment(folder: Path) -> dict[str, str]:
    """Environment with which a process leaves what `resources` reads."""
    return {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}


def resources(folder: Path) -> dict[str, Resources]:
    """Resources of the kernels that a process compiled, by name, from its dumps in `folder`; one kernel a name."""
    found = {}
    for path in sorted(folder.glob("*.ptxas")):
        kernel = path.stem.rpartition("_")[0]  # a number follows, not the same one in every dump
        text = path.read_text()
        (memory,) = folder.glob(f"{kernel}_*.resources.txt")
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
        shared = re.search(r"smem_scratch_bytes=(\d+)", memory.read_text())
        assert registers, f"{path} does not say how many registers are used"
        assert shared, f"{memory} does not say how much shared memory is used"
        found[kernel] = Resources(max(registers), sum(spilled), int(shared[1]))
    return found


def _device(chip: str) -> AbstractDevice:
    class Device(AbstractDevice):
        compute_capability = CHIPS[chip].capability  # Mosaic asks for it; AbstractDevice has none

    return Device(device_kind=chip, num_cores=CHIPS[chip].num_sms, platform="cuda")


def _target_config(chip: Chip) -> str:
    """A GpuTargetConfigProto in text form; what is not the chip's is that of an H100."""
    major, minor = chip.capability.split(".")
    features = " feature_extension: ACCELERATED_FEATURES" if major == "12" else ""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": chip.shared_memory_per_sm,
        "shared_memory_per_block_optin": chip.shared_memory_per_block,
        "threads_per_core_limit": 2048,
        "core_count": chip.num_sms,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": 3_352_320_000_000,
        "l2_cache_size": 52_428_800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 84_942_979_072,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    sizes = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {sizes} cuda_compute_capability {{ major: {major} minor: {minor}{features} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 1 } device_description_str: "NVIDIA"'
    )
