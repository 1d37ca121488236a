"""Compiling for a TPU that is not here: libtpu's compiler needs no device."""

import importlib.util
import re
from collections.abc import Callable
from typing import Any, Final

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from scripts.kernels import aot

CHIPS: Final = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
"""Chip -> libtpu's name of the smallest slice."""

ENVIRONMENT: Final = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""What a process that compiles must have been started with."""


def missing_compiler() -> str | None:
    """Why nothing can be compiled, or None."""
    return None if importlib.util.find_spec("libtpu") else "libtpu is not installed"


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> Any:
    """`function` compiled for one core of a chip, a key of CHIPS; one chip a process. See `aot.compile_on`."""
    aot.check_environment(ENVIRONMENT)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    device: Any = topology.devices[0]  # known by name only
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract)
    return aot.compile_on(device, mesh, function, *arguments, **jit_options)


def vmem_bytes(text: str) -> dict[str, dict[str, int]]:
    """Kernel -> {"vmem": bytes of VMEM that it has for itself}, from a compiled program's `as_text()`."""
    found: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name = re.match(r"\s*(?:ROOT )?%?([A-Za-z_]+)", line)
            memory = re.search(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', line)
            assert name, f"no name: {line[:300]}"
            assert memory, f"no VMEM: {line[:300]}"
            found[name[1].rstrip("_")] = {"vmem": int(memory[1])}
    return found
