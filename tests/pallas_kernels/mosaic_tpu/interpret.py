"""Running TPU kernels on a CPU with every race an error. The one module that asks JAX's private race detector."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

MODES: Final = ("on_wait", "eager")
"""When the interpreter carries out a copy: as late or as soon as it may. Each mode misses faults the other shows."""


@contextmanager
def interpreted(mode: str, *, detect_races: bool = True) -> Iterator[None]:
    """Kernels traced inside run interpreted; copies out of order with reads and writes fail the test."""
    params = pltpu.InterpretParams(detect_races=detect_races, dma_execution_mode=mode)  # type: ignore[arg-type]
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
            jax.effects_barrier()
        races = interpret_pallas_call.races
        if races is not None and races.races_found:  # jax 0.11 only prints them, and keeps the last launch's
            pytest.fail("the interpreter found a race")
    finally:
        pltpu.reset_tpu_interpret_mode_state()
