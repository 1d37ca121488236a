"""Runs Mosaic GPU kernels on the CPU, in Pallas' interpreter, which checks shared memory for races.

What it needs beyond the public interpreter is private to JAX and lives here: a CPU rule for `plgpu.mma`, and the list
of races, which JAX 0.11.2 prints and does not raise.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

_PARAMS: Final = plgpu.InterpretGPUParams(detect_races=True)  # one object, so that traces are shared


@cache
def _register_mma() -> None:
    def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + jnp.dot(a.astype(acc.dtype), b.astype(acc.dtype), precision="highest")

    mlir.register_lowering(primitives.mma_p, mlir.lower_fun(mma, multiple_results=False), platform="cpu")


@contextmanager
def interpreted() -> Iterator[None]:
    """Interprets every Pallas kernel traced inside, and fails on a race. A deadlock hangs: set a timeout."""
    _register_mma()
    try:
        with plgpu.force_gpu_interpret_mode(_PARAMS), warnings.catch_warnings():
            # NumPy multiplies for `wgmma`: keys past the end may be NaN, what comes of them is masked.
            warnings.filterwarnings("ignore", message="invalid value encountered in matmul", category=RuntimeWarning)
            yield
        races = gpu_callbacks._races
        assert races is None or not races.races_found, "the interpreter found a race in shared memory"
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
