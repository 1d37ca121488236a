"""Compiling for a device that is not here: what is the same for all of them."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh


def check_environment(needed: Mapping[str, str]) -> None:
    """Fails if this process was not started with these variables."""
    missing = {name: value for name, value in needed.items() if os.environ.get(name) != value}
    assert not missing, f"start the process with {missing}"


def compile_on(
    device: Any, mesh: AbstractMesh, function: Callable[..., Any], *arguments: Any, **jit_options: Any
) -> Any:
    """`function` compiled for a device.

    Args:
      device: of a described topology.
      mesh: the abstract mesh that tells Pallas what it traces for.
      function: takes `arguments`.
      arguments: pytrees of arrays or `ShapeDtypeStruct`s; only shapes and dtypes count.
      jit_options: of jax.jit, for example donate_argnums.

    Returns:
      The compiled function: see its `memory_analysis()` and `as_text()`.
    """
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with use_abstract_mesh(mesh):
        return jax.jit(function, **jit_options).lower(*shapes).compile()
