"""KV heads over devices: what is refused; the rest in a process that has four of them."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import pallas_kernels
from paged_jax import Batch, KVLayout, KVPages, sharding
from tests.paged_jax.model_cache import i32

ROOT = Path(__file__).parents[2]
MESH = AbstractMesh((2, 4), ("data", "heads"))


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", *arguments]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_on_four_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    file = str(Path(__file__).parent / "on_four_devices.py")
    assert " passed" in run("pytest", "-n0", "-p", "no:cacheprovider", file, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


@pytest.mark.aot
@pytest.mark.parametrize("implementation", sorted({"xla", "mosaic_tpu"} & set(pallas_kernels.IMPLEMENTATIONS)))
def test_compiles_for_four_v5e_chips(implementation: str) -> None:
    """A decode step moves no page between chips and copies none."""
    run(
        "tests.paged_jax.compile_v5e", implementation, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="true",
    )  # fmt: skip


def layout(num_kv_heads: int) -> KVLayout:
    return KVLayout(1, 2, 1, num_kv_heads=num_kv_heads, head_dim=2)


@pytest.mark.parametrize(("num_kv_heads", "possible"), [(1, "1"), (2, "1 or 2"), (6, "1 or 2 or 3 or 6")])
def test_heads_that_do_not_fill_the_devices_are_refused(num_kv_heads: int, possible: str) -> None:
    message = f"num_kv_heads .*multiple.*'heads'.* got {num_kv_heads} KV heads on 4 devices; take {possible} of them"
    with pytest.raises(ValueError, match=message):
        sharding.shardings(layout(num_kv_heads), MESH, "heads")
    kv, q, zeros = KVPages.create(layout(num_kv_heads)), jnp.ones((1, num_kv_heads, 2), jnp.float32), i32(0)
    batch = Batch(zeros[None], zeros, i32(0, 0), zeros, zeros, zeros, 1)
    with pytest.raises(ValueError, match=message):
        sharding.attention(MESH, "heads")(q, q, q, kv, batch, layer=0)


def test_an_axis_that_the_mesh_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axis must be one of the mesh's \('data', 'heads'\), got 'kv'"):
        sharding.shardings(layout(4), MESH, "kv")
    assert sharding.shardings(layout(4), MESH, "heads").scales is None
