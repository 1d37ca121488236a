"""Shapes and dtypes of every call are checked in tests; nothing is promoted silently."""

import os

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401 (the hook finds it by name)

# Before any of these is imported: functions are wrapped as their modules load.
install_import_hook(["paged_jax", "pallas_kernels", "models"], "tests.typecheck.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
