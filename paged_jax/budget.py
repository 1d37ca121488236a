"""How many pages fit: what the device's memory leaves once weights and temporaries have theirs."""

from dataclasses import replace
from typing import Any

import jax

from paged_jax import steps
from paged_jax.config import EngineConfig
from paged_jax.errors import MemoryBudgetError
from paged_jax.layout import KVLayout
from paged_jax.steps import Model

_CPU_POOL_BYTES = 1 << 30


def size_pool(model: Model, params: Any, layout: KVLayout, config: EngineConfig) -> KVLayout:
    """The layout with as many pages as the memory of the parameters' device allows.

    On an accelerator: pages = (memory_utilization * bytes_limit - weights - peak temporary memory of the compiled
    steps) / bytes_per_page. A device that reports no limit (a CPU) gets what `max_seqs * max_model_len` needs, at
    most 1 GiB.

    Args:
      model: the model contract (see `paged_jax.steps.Model`).
      params: its parameters, on the device that will hold the pool.
      layout: the layout; its `num_pages` is replaced.
      config: limits of the engine.

    Raises:
      MemoryBudgetError: the pool would not hold one sequence of `max_model_len` tokens.
    """
    leaves = jax.tree.leaves(params)
    (device,) = leaves[0].devices()
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return cpu_pool(layout, config)
    weights = sum(leaf.nbytes for leaf in leaves)
    small = replace(layout, num_pages=layout.pages_for(config.max_model_len) + 1)
    temporary = steps.temporary_bytes(model, params, small, config)
    return accelerator_pool(layout, config, limit=limit, weights=weights, temporary=temporary)


def cpu_pool(layout: KVLayout, config: EngineConfig) -> KVLayout:
    """The pool of a device that reports no memory limit: what the engine can use, at most 1 GiB.

    Raises:
      MemoryBudgetError: 1 GiB does not hold one sequence of `max_model_len` tokens.
    """
    wanted = config.max_seqs * layout.pages_for(config.max_model_len) + 1
    return _checked(layout, config, min(wanted, _CPU_POOL_BYTES // layout.bytes_per_page), f"{_CPU_POOL_BYTES:,} bytes")


def accelerator_pool(layout: KVLayout, config: EngineConfig, *, limit: int, weights: int, temporary: int) -> KVLayout:
    """The pool that `limit` bytes of device memory leave.

    Args:
      layout: the layout; its `num_pages` is replaced.
      config: gives memory_utilization and max_model_len.
      limit: bytes that JAX may use on the device.
      weights: bytes of the parameters.
      temporary: peak temporary bytes of a step.

    Raises:
      MemoryBudgetError: the pool would not hold one sequence of `max_model_len` tokens.
    """
    left = int(limit * config.memory_utilization) - weights - temporary
    return _checked(
        layout,
        config,
        max(left, 0) // layout.bytes_per_page,
        f"{config.memory_utilization} (memory_utilization) of {limit:,} bytes, less {weights:,} for weights and "
        f"{temporary:,} for temporaries: {max(left, 0):,} bytes",
    )


def _checked(layout: KVLayout, config: EngineConfig, num_pages: int, memory: str) -> KVLayout:
    needed = layout.pages_for(config.max_model_len) + 1
    if num_pages < needed:
        largest = max(num_pages - 1, 0) * layout.page_size
        raise MemoryBudgetError(
            f"the pool is too small: {memory} hold {num_pages} pages of {layout.bytes_per_page:,} bytes, but one "
            f"sequence of max_model_len = {config.max_model_len} tokens needs {needed} (the null page included). The "
            f"largest sequence that would fit has {largest} tokens. Lower max_model_len, raise memory_utilization "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION is the share of a GPU that JAX may use at all, 0.75 by default), take a "
            "smaller dtype, or give the number of pages yourself"
        )
    return replace(layout, num_pages=num_pages)
