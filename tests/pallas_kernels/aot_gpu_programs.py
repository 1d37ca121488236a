"""Compiles a program that holds Mosaic GPU kernels: `python -m tests.pallas_kernels.aot_gpu_programs CHIP PROGRAM`.

Prints one JSON line: the program's temporary memory, and what each kernel takes.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged_jax import batch as batches
from paged_jax.cache import KVPages
from pallas_kernels import paged_attention, write_kv
from tests.pallas_kernels import aot_gpu

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

NUM_SEQS: Final = 32
CONTEXT: Final = 2048
BF16: Final = jnp.bfloat16


def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention(
    head_dim: int,
    max_query_len: int,
    *,
    num_heads: int = 64,
    num_kv_heads: int = 8,
    page_size: int = 16,
    dtype: Any = BF16,
    soft_cap: float | None = None,
) -> Program:
    """The operation alone: a decode step, or a chunk of prefill beside it."""
    num_tokens = NUM_SEQS if max_query_len == 1 else 4096
    function = partial(
        paged_attention, num_kv_heads=num_kv_heads, max_query_len=max_query_len, logit_soft_cap=soft_cap,
        return_lse=True, implementation="mosaic_gpu",
    )  # fmt: skip

    def call(q: Array, pool: Array, tables: Array, lens: Array, cu: Array, *scalars: Array) -> Any:
        row_offset, scale, window = scalars
        return function(q, pool, tables, lens, cu, row_offset=row_offset, scale=scale, sliding_window=window)

    arguments = (
        shape(num_tokens, num_heads, head_dim, dtype=dtype),
        shape(8192, page_size, num_kv_heads * 2 * head_dim, dtype=dtype),
        shape(NUM_SEQS, CONTEXT // page_size), shape(NUM_SEQS), shape(NUM_SEQS + 1),
        shape(), shape(dtype=jnp.float32), shape(),
    )  # fmt: skip
    return call, arguments, {}


def layers(num_pages: int, num_layers: int = 4, head_dim: int = 128, num_kv_heads: int = 8) -> Program:
    """A scan over layers that writes and attends, the pool a donated carry."""

    def call(pool: Array, q: Array, k: Array, slots: Array, tables: Array, lens: Array, cu: Array) -> Any:
        def layer(pool: Array, index: Array) -> tuple[Array, Array]:
            offset = index * num_pages
            pool = write_kv(pool, k, k, slots, row_offset=offset)
            out = paged_attention(
                q, pool, tables, lens, cu, row_offset=offset, num_kv_heads=num_kv_heads, scale=0.1, max_query_len=1,
                implementation="mosaic_gpu",
            )  # fmt: skip
            return pool, out.sum()

        return lax.scan(layer, pool, jnp.arange(num_layers, dtype=jnp.int32))

    arguments = (
        shape(num_layers * num_pages, 16, num_kv_heads * 2 * head_dim, dtype=BF16),
        shape(NUM_SEQS, 32, head_dim, dtype=BF16), shape(NUM_SEQS, num_kv_heads, head_dim, dtype=BF16),
        shape(NUM_SEQS), shape(NUM_SEQS, CONTEXT // 16), shape(NUM_SEQS), shape(NUM_SEQS + 1),
    )  # fmt: skip
    return call, arguments, {"donate_argnums": 0}


def model(num_tokens: int, max_query_len: int) -> Program:
    """A whole step of a small Llama: bfloat16, 2 layers, 8 heads on 2 KV heads of 128."""
    from models.config import TransformerConfig
    from models.transformer import functional, random_params

    config = TransformerConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=8, num_kv_heads=2,
        head_dim=128, max_model_len=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    decoder = functional(config, unroll_layers=True)
    layout = decoder.kv_layout(num_pages=8192, page_size=16, dtype=BF16)
    batch = jax.eval_shape(
        partial(batches.ragged, page_size=16, num_tokens=num_tokens, max_query_len=max_query_len),
        shape(NUM_SEQS, CONTEXT // 16), shape(NUM_SEQS), shape(NUM_SEQS),
    )  # fmt: skip
    batch = replace(batch, implementation="mosaic_gpu")

    def step(params: Any, token_ids: Array, batch: Any, kv: KVPages) -> tuple[Array, KVPages]:
        hidden, kv = decoder(params, token_ids, batch, kv)
        return jnp.argmax(decoder.logits(params, hidden[batch.logit_rows]), axis=-1), kv

    params = jax.eval_shape(lambda: random_params(config, dtype=BF16))
    kv = jax.eval_shape(lambda: KVPages.create(layout))
    return step, (params, shape(num_tokens), batch, kv), {"donate_argnums": 3}


PROGRAMS: Final[dict[str, Callable[[], Program]]] = {
    **{f"decode-{d}": partial(attention, d, 1) for d in (64, 128, 256)},
    **{f"prefill-{d}": partial(attention, d, 4096) for d in (64, 128, 256)},
    **{f"decode-128-page-{p}": partial(attention, 128, 1, page_size=p) for p in (8, 32, 64, 128)},
    **{f"decode-128-group-{g}": partial(attention, 128, 1, num_heads=8 * g) for g in (1, 3, 16)},
    "decode-128-float16-cap": partial(attention, 128, 1, dtype=jnp.float16, soft_cap=50.0),
    "prefill-128-float16-cap": partial(attention, 128, 4096, dtype=jnp.float16, soft_cap=50.0),
    "prefill-128-group-3": partial(attention, 128, 4096, num_heads=24),
    "layers-small-pool": partial(layers, 512),
    "layers-large-pool": partial(layers, 16384),
    "model-decode": partial(model, NUM_SEQS, 1),
    "model-prefill": partial(model, 1024, 1024),
}


def main(chip: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= aot_gpu.dump_environment(Path(folder))
        function, arguments, options = PROGRAMS[name]()
        compiled = aot_gpu.compile_for(chip, function, *arguments, **options)
        row = {
            "program": name,
            "chip": chip,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "pool_bytes": max(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments)),
            "kernels": {kernel: used._asdict() for kernel, used in aot_gpu.resources(Path(folder)).items()},
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
