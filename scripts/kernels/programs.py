"""What is compiled for chips that are not here: the operation by itself, a scan over layers, whole steps of a model.

`python -m scripts.kernels.programs TARGET NAME`, started with `environment(TARGET)`, prints a line of JSON: what the
program and the kernels in it take.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import paged_attention, write_kv
from scripts.kernels import aot_gpu, aot_tpu, children

TARGETS: Final = (*aot_gpu.CHIPS, *aot_tpu.CHIPS)
REQUIRED: Final = ("sm_90", "sm_100", "v5e", "v6e")
"""Targets for which everything must compile; the others are reported."""

CONTEXT: Final = 2048
NUM_SEQS: Final = 32
_SECONDS: Final = 900.0  # that one program may take on a slow machine
GROWTH: Final = 0.01
"""What temporary memory may grow by, as a share of what the pool grows by. XLA for TPUs chooses other buffers for a
larger pool, once: on v6e 1.4 MB become 2.0 MB between 20,000 and 40,000 pages."""


class Program(NamedTuple):
    """A function, the shapes of its arguments, which of them is donated, and the pools among them."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    pools: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Attention:
    """The operation by itself: a decode step, or with `max_query_len` above 1 a chunk of prefill beside one.

    With `num_pages` small XLA keeps the pool in a TPU's VMEM and compiles something else.
    """

    heads: tuple[int, int]
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    soft_cap: float | None = None
    num_tokens: int = NUM_SEQS
    max_query_len: int = 1
    num_pages: int = 20_000

    def build(self, implementation: str) -> Program:
        """The program; everything that may be traced is."""
        num_heads, num_kv_heads = self.heads

        def attend(q: Array, pool: Array, scales: Any, *operands: Array) -> Any:
            *tables, row_offset, scale, window = operands
            return paged_attention(
                q, pool, *tables, row_offset=row_offset, scale=scale, sliding_window=window, kv_scales=scales,
                num_kv_heads=num_kv_heads, max_query_len=self.max_query_len, logit_soft_cap=self.soft_cap,
                return_lse=True, implementation=implementation,
            )  # fmt: skip

        lanes = num_kv_heads * 2 * self.head_dim
        pool = _shape(self.num_pages, self.page_size, lanes, dtype=self.kv_dtype or self.dtype)
        scales = _shape(self.num_pages, num_kv_heads * 2, self.page_size, dtype="float32") if self.kv_dtype else None
        q = _shape(self.num_tokens, num_heads, self.head_dim, dtype=self.dtype)
        tables = _shape(NUM_SEQS, CONTEXT // self.page_size), _shape(NUM_SEQS), _shape(NUM_SEQS + 1)
        arguments = q, pool, scales, *tables, _shape(), _shape(dtype="float32"), _shape()
        return Program(attend, arguments, (), (pool,) if scales is None else (pool, scales))


@dataclass(frozen=True)
class Layers:
    """A scan over 4 layers that writes and attends, the pool a donated carry and the layer's offset traced."""

    num_pages: int = 20_000

    def build(self, implementation: str) -> Program:
        """A decode step with 32/8 heads of 128 in bfloat16."""

        def call(pool: Array, q: Array, k: Array, slots: Array, *tables: Array) -> Any:
            def layer(pool: Array, index: Array) -> tuple[Array, Array]:
                offset = index * self.num_pages
                pool = write_kv(pool, k, k, slots, row_offset=offset)
                out = paged_attention(
                    q, pool, *tables, row_offset=offset, num_kv_heads=8, scale=0.1, max_query_len=1,
                    implementation=implementation,
                )  # fmt: skip
                return pool, out.sum()

            return lax.scan(layer, pool, jnp.arange(4, dtype=jnp.int32))

        pool = _shape(4 * self.num_pages, 16, 8 * 2 * 128, dtype="bfloat16")
        q, k = (_shape(NUM_SEQS, heads, 128, dtype="bfloat16") for heads in (32, 8))
        tables = _shape(NUM_SEQS, CONTEXT // 16), _shape(NUM_SEQS), _shape(NUM_SEQS + 1)
        return Program(call, (pool, q, k, _shape(NUM_SEQS), *tables), (0,), (pool,))


@dataclass(frozen=True)
class ModelStep:
    """A whole step of a Llama, the pool donated: bfloat16, 2 layers, 8/2 heads of 128."""

    num_tokens: int
    max_query_len: int
    num_pages: int = 20_000

    def build(self, implementation: str) -> Program:
        """Greedy: token ids in, token ids out."""
        from models.config import TransformerConfig
        from models.transformer import functional, random_params
        from paged_jax import KVPages, batch

        config = TransformerConfig(
            vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=8, num_kv_heads=2,
            head_dim=128, max_model_len=CONTEXT, tie_word_embeddings=True,
        )  # fmt: skip
        model = functional(config, unroll_layers=True)
        layout = model.kv_layout(num_pages=self.num_pages, page_size=16, dtype=jnp.bfloat16)
        ragged = partial(batch.ragged, page_size=16, num_tokens=self.num_tokens, max_query_len=self.max_query_len)
        tables = _shape(NUM_SEQS, CONTEXT // 16), _shape(NUM_SEQS), _shape(NUM_SEQS)
        of_batch = replace(jax.eval_shape(ragged, *tables), implementation=implementation)

        def step(params: Any, token_ids: Array, of_batch: Any, kv: Any) -> tuple[Array, Any]:
            hidden, kv = model(params, token_ids, of_batch, kv)
            return jnp.argmax(model.logits(params, hidden[of_batch.logit_rows]), axis=-1), kv

        params = jax.eval_shape(partial(random_params, config, dtype=jnp.bfloat16))
        kv = jax.eval_shape(lambda: KVPages.create(layout))
        return Program(step, (params, _shape(self.num_tokens), of_batch, kv), (3,), (kv.pages,))


AnyProgram = Attention | Layers | ModelStep


def _shape(*sizes: int, dtype: DTypeLike = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def _prefill(program: Attention) -> Attention:
    return replace(program, num_tokens=2048, max_query_len=2048)


_LLAMA: Final = Attention((32, 8), 128)

MAIN: Final[Mapping[str, AnyProgram]] = {
    "decode-32/8-128": _LLAMA,
    "prefill-32/8-128": _prefill(_LLAMA),
    "model-decode": ModelStep(NUM_SEQS, 1),
    "model-prefill": ModelStep(1024, 1024),
}
"""Name -> what continuous integration compiles."""

_BOTH: Final[Mapping[str, AnyProgram]] = {
    **MAIN,
    "layers": Layers(),
    "decode-64/8-128": Attention((64, 8), 128),
    "prefill-64/8-128": _prefill(Attention((64, 8), 128)),
    "decode-32/32-128": Attention((32, 32), 128),
    "decode-40/10-128": Attention((40, 10), 128),
    "prefill-40/10-128": _prefill(Attention((40, 10), 128)),
    "decode-9/3-64": Attention((9, 3), 64),
    "prefill-9/3-64": _prefill(Attention((9, 3), 64)),
    "decode-8/1-256": Attention((8, 1), 256),
    "prefill-8/1-256": _prefill(Attention((8, 1), 256)),
    "decode-14/2-64-page-8": Attention((14, 2), 64, page_size=8),
    **{f"decode-32/8-128-page-{size}": replace(_LLAMA, page_size=size) for size in (8, 32, 64, 128)},
}
GPU_PROGRAMS: Final[Mapping[str, AnyProgram]] = {
    **_BOTH,
    **{
        f"{kernel}-64/8-{head_dim}-{kv_dtype}-page-{page_size}": build(
            Attention((64, 8), head_dim, page_size=page_size, kv_dtype=kv_dtype)
        )
        for kernel, build in (("decode", replace), ("prefill", _prefill))
        for head_dim, kv_dtype, page_size in ((64, "int8", 16), (128, "int8", 32), (128, "float8_e4m3fn", 32))
    },
    "decode-32/2-128": Attention((32, 2), 128),
    "decode-32/8-128-float16-cap": replace(_LLAMA, dtype="float16", soft_cap=50.0),
    "prefill-32/8-128-float16-cap": _prefill(replace(_LLAMA, dtype="float16", soft_cap=50.0)),
}
TPU_PROGRAMS: Final[Mapping[str, AnyProgram]] = {
    **_BOTH,
    "decode-9/3-64-float32": Attention((9, 3), 64, dtype="float32"),
    "decode-8/1-256-float32": Attention((8, 1), 256, dtype="float32"),
    "prefill-40/10-128-float32": _prefill(Attention((40, 10), 128, dtype="float32")),
    "decode-32/8-128-int8": replace(_LLAMA, page_size=128, kv_dtype="int8"),
    "decode-32/8-128-float8": replace(_LLAMA, page_size=128, kv_dtype="float8_e4m3fn"),
}


def programs(target: str) -> Mapping[str, AnyProgram]:
    """The programs of a target, by name."""
    return GPU_PROGRAMS if target in aot_gpu.CHIPS else TPU_PROGRAMS


def environment(target: str) -> Mapping[str, str]:
    """What a process that compiles for a target must be started with."""
    return aot_gpu.ENVIRONMENT if target in aot_gpu.CHIPS else aot_tpu.ENVIRONMENT


def missing_compiler(target: str) -> str | None:
    """Why nothing can be compiled for a target, or None."""
    return (aot_gpu if target in aot_gpu.CHIPS else aot_tpu).missing_compiler()


def compile_program(target: str, name: str) -> dict[str, Any]:
    """Compiles a program, one that donates its pool also for a pool twice as large, and says what it takes.

    Returns a row: "name", "target", "kernels" (GPU: name -> its `aot_gpu.Resources`; TPU: name -> bytes of VMEM),
    "temporary_bytes", "double_pool_temporary_bytes" or None, "pool_bytes", "pool_copies" (copies of an array of a
    pool's shape), "seconds", "problem" (what must not be, or None).
    """
    started = time.perf_counter()
    program = programs(target)[name]
    compiled, kernels, built = _compile(target, program)
    shapes = ["[" + ",".join(map(str, pool.shape)) + "]" for pool in built.pools]
    copies = [line for line in compiled.as_text().splitlines() if re.search(r"\bcopy(-start)?\(", line)]
    row: dict[str, Any] = {
        "name": name,
        "target": target,
        "kernels": kernels,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "double_pool_temporary_bytes": None,
        "pool_bytes": sum(pool.size * pool.dtype.itemsize for pool in built.pools),
        "pool_copies": sum(any(shape in line for shape in shapes) for line in copies),
    }
    if built.donated:
        double, _, _ = _compile(target, replace(program, num_pages=2 * program.num_pages))
        row["double_pool_temporary_bytes"] = double.memory_analysis().temp_size_in_bytes
    return {**row, "seconds": round(time.perf_counter() - started, 1), "problem": problem(row)}


def problem(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a program that compiled."""
    used, double = row["temporary_bytes"], row["double_pool_temporary_bytes"]
    if not row["kernels"]:
        return "there is no kernel in it"
    if row["pool_copies"]:
        return f"{row['pool_copies']} copies of the pool"
    if used > row["pool_bytes"] / 4:
        return f"{used} temporary bytes beside a pool of {row['pool_bytes']}"
    if double is not None and double - used > GROWTH * row["pool_bytes"]:
        return f"temporary memory grows with the pool: {used} bytes, and {double} with twice the pages"
    return None


def _compile(target: str, program: AnyProgram) -> tuple[Any, dict[str, Any], Program]:
    if target in aot_tpu.CHIPS:
        built = program.build("mosaic_tpu")
        compiled = aot_tpu.compile_for(target, built.function, *built.arguments, donate_argnums=built.donated)
        return compiled, aot_tpu.vmem_bytes(compiled.as_text()), built
    built = program.build("mosaic_gpu")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= aot_gpu.dump_environment(Path(folder))
        compiled = aot_gpu.compile_for(target, built.function, *built.arguments, donate_argnums=built.donated)
        kernels = {name: used._asdict() for name, used in aot_gpu.resources(Path(folder)).items()}
    return compiled, kernels, built


def compile_all(target: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`compile_program`, each in a process of its own; {"name", "target", "error"} for what does not compile.

    A process compiles for one chip, and the GPU's compiler remembers kernels and says once what they take.
    """
    command = [sys.executable, "-m", "scripts.kernels.programs", target]
    for name in names:
        for row in children.rows(command, [name], environment=environment(target), silence=_SECONDS):
            yield {"target": target, **row}


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    print(json.dumps(compile_program(*sys.argv[1:])), flush=True)
