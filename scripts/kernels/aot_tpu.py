"""Compiling for a TPU that is not here: libtpu's compiler needs no device."""

import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

CHIPS: Final = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
"""Chip -> libtpu's name of the smallest slice."""

ENVIRONMENT: Final = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""What a process that compiles must have been started with."""


def missing_compiler() -> str | None:
    """Why nothing can be compiled, or None."""
    return None if importlib.util.find_spec("libtpu") else "libtpu is not installed"


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> Any:
    """`function` compiled for one core of a chip, a key of CHIPS; one chip a process.

    Args:
      chip: what to compile for.
      function: takes `arguments`.
      arguments: pytrees of arrays or `ShapeDtypeStruct`s; only shapes and dtypes count.
      jit_options: of jax.jit, for example donate_argnums.

    Returns:
      The compiled function: see its `memory_analysis()` and `as_text()`.
    """
    missing = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    assert not missing, f"start the process with {missing}"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    device: Any = topology.devices[0]  # known by name only
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract)):
        return jax.jit(function, **jit_options).lower(*shapes).compile()


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
