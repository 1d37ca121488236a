"""Compiling for a TPU that is not here: libtpu's compiler needs no device."""

import os
from collections.abc import Callable
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

TOPOLOGIES: Final = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}

ENVIRONMENT: Final = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""What a process that compiles must have been started with."""


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> Any:
    """`function` compiled for one core of a chip, a key of TOPOLOGIES; one chip a process.

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
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    device = topology.devices[0]
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract)):
        return jax.jit(function, **jit_options).lower(*shapes).compile()
