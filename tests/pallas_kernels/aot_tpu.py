"""Compiling for a TPU that is not here: libtpu's compiler needs no device.

`python -m tests.pallas_kernels.aot_tpu v5e` compiles the main shapes, in a process started with `ENVIRONMENT`, and
prints a line of JSON for each; `run` does that from another process.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels import paged_attention

TOPOLOGIES: Final = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}

ENVIRONMENT: Final = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""What a process that compiles must have been started with."""

Shape = jax.ShapeDtypeStruct


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
    shapes = jax.tree.map(lambda x: Shape(x.shape, x.dtype, sharding=sharding), arguments)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract)):
        return jax.jit(function, **jit_options).lower(*shapes).compile()


@dataclass(frozen=True)
class Attention:
    """One shape of the operation. With `num_pages` small XLA keeps the pool in VMEM and compiles something else."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    num_tokens: int = 32
    max_query_len: int = 1
    num_seqs: int = 32
    pages_per_seq: int = 128
    num_pages: int = 20_000

    def compile(self, chip: str) -> dict[str, Any]:
        """Compiles it and returns what `measure` finds."""

        def attend(pool: Any, scales: Any, q: Any, *operands: Any) -> Any:
            *tables, row_offset, scale, window = operands
            return paged_attention(
                q, pool, *tables, row_offset=row_offset, scale=scale, sliding_window=window, kv_scales=scales,
                num_kv_heads=self.num_kv_heads, max_query_len=self.max_query_len, return_lse=True,
                implementation="mosaic_tpu",
            )  # fmt: skip

        dtype, int32 = jnp.dtype(self.dtype), jnp.dtype("int32")
        lanes = self.num_kv_heads * 2 * self.head_dim
        pool = Shape((self.num_pages, self.page_size, lanes), jnp.dtype(self.kv_dtype or dtype))
        scales = Shape((self.num_pages, self.num_kv_heads * 2, self.page_size), jnp.dtype("float32"))
        compiled = compile_for(
            chip, attend, pool, scales if self.kv_dtype else None,
            Shape((self.num_tokens, self.num_heads, self.head_dim), dtype),
            Shape((self.num_seqs, self.pages_per_seq), int32), Shape((self.num_seqs,), int32),
            Shape((self.num_seqs + 1,), int32), Shape((), int32), Shape((), jnp.dtype("float32")), Shape((), int32),
        )  # fmt: skip
        return measure(compiled, pool, scales)


@dataclass(frozen=True)
class ModelStep:
    """A whole jitted step of a decoder, the pool donated: 2 layers, 8/2 heads of 128, decode or a prefill chunk."""

    num_tokens: int
    max_query_len: int
    num_pages: int = 20_000

    def compile(self, chip: str) -> dict[str, Any]:
        """Compiles it and returns what `measure` finds."""
        from models.config import TransformerConfig
        from models.transformer import functional, random_params
        from paged_jax import KVPages, batch

        config = TransformerConfig(
            vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=8, num_kv_heads=2,
            head_dim=128, max_model_len=2048,
        )  # fmt: skip
        model = functional(config, unroll_layers=True)
        layout = model.kv_layout(num_pages=self.num_pages, dtype=jnp.bfloat16)
        kv = jax.eval_shape(lambda: KVPages.create(layout))
        params = jax.eval_shape(partial(random_params, config, dtype=jnp.bfloat16))
        lens = [Shape((32,), jnp.dtype("int32"))] * 2
        ragged = partial(batch.ragged, page_size=16, num_tokens=self.num_tokens, max_query_len=self.max_query_len)
        of_batch = jax.eval_shape(ragged, Shape((32, 128), jnp.dtype("int32")), *lens)
        of_batch = replace(of_batch, implementation="mosaic_tpu")

        def step(params: Any, token_ids: Any, of_batch: Any, kv: Any) -> Any:
            hidden, kv = model(params, token_ids, of_batch, kv)
            return model.logits(params, hidden[of_batch.logit_rows]), kv

        token_ids = Shape((self.num_tokens,), jnp.dtype("int32"))
        compiled = compile_for(chip, step, params, token_ids, of_batch, kv, donate_argnums=3)
        return measure(compiled, kv.pages)


def measure(compiled: Any, *pools: Any) -> dict[str, Any]:
    """Temporary bytes, and how many copies there are of anything shaped like one of `pools`."""
    shapes = ["[" + ",".join(map(str, pool.shape)) + "]" for pool in pools]
    copies = [line for line in compiled.as_text().splitlines() if re.search(r"\bcopy(-start)?\(", line)]
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "pool_copies": sum(any(shape in line for shape in shapes) for line in copies),
    }


SHAPES: Final = {
    "decode-32/8-128": Attention(32, 8, 128),
    "prefill-32/8-128": Attention(32, 8, 128, num_tokens=2048, max_query_len=2048),
    "decode-9/3-64-f32": Attention(9, 3, 64, dtype="float32"),
    "decode-14/2-64-page-8": Attention(14, 2, 64, page_size=8),
    "decode-40/10-128": Attention(40, 10, 128),
    "decode-8/1-256-f32": Attention(8, 1, 256, dtype="float32"),
    "decode-32/8-128-int8": Attention(32, 8, 128, page_size=128, kv_dtype="int8", pages_per_seq=16),
    "decode-32/8-128-fp8": Attention(32, 8, 128, page_size=128, kv_dtype="float8_e4m3fn", pages_per_seq=16),
    "model-decode": ModelStep(32, 1),
    "model-prefill": ModelStep(512, 512),
}


def compile_all(chip: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compiles some of SHAPES, each with the pool as it is and half as large."""
    for name in names or list(SHAPES):
        shape = SHAPES[name]
        half = replace(shape, num_pages=shape.num_pages // 2).compile(chip)
        yield {"name": name, "chip": chip, "half": half, **asdict(shape), **shape.compile(chip)}


def run(chip: str, names: list[str], *, timeout: float) -> list[dict[str, Any]]:
    """`compile_all` in a process of its own.

    Raises:
      RuntimeError: it failed; the message is the end of what it wrote.
    """
    command = [sys.executable, "-m", "tests.pallas_kernels.aot_tpu", chip, *names]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for result in compile_all(sys.argv[1], sys.argv[2:]):
        print(json.dumps(result), flush=True)
