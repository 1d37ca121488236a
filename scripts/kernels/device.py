"""What is checked and timed on a real GPU or TPU, in families: `python -m scripts.kernels.device full FAMILY NAME...`.

Prints a line of JSON for each name; an error ends the process. `tiny` in place of `full` has the same families in sizes
that a CPU computes at once, where XLA's implementation stands in for the kernel.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.config import TransformerConfig
from models.transformer import functional, random_params
from paged_jax import KVPages
from paged_jax import batch as batches
from pallas_kernels import default_implementation
from scripts.kernels import timings
from scripts.kernels.cases import SEED, Case, assert_contract
from scripts.kernels.sampling import GEOMETRY, KERNEL_GEOMETRIES, sample
from scripts.kernels.timings import Shape

Family = Callable[[str, str, str], dict[str, Any]]

_NUM_CASES: Final = {"full": (10, 38), "tiny": (2, 4)}  # geometries, cases; two long ones are added to the full
_TINY_GEOMETRY: Final = {
    **GEOMETRY, "heads": ((4, 2),), "head_dim": (16,), "page_size": (4, 16), "dtype": ("float32",), "kv_dtype": (None,),
    "max_query_len": (1, 24),
}  # fmt: skip

_DECODE: Final = Shape(32, 2048)
_PREFILL: Final = Shape(1, 4096, 4096)
_TINY: Final = Shape(3, 40, heads=(4, 2), head_dim=8)
SHAPES: Final[Mapping[str, Mapping[str, tuple[Shape, ...]]]] = {
    "full": {
        "attention": (
            _DECODE, _PREFILL, Shape(1, 32_768), Shape(128, 2048), Shape(256, 128), Shape(8, 8192),
            Shape(4, 8192, 1024),
        ),
        "contiguous": (_DECODE, _PREFILL),
        "torch": (_DECODE, _PREFILL),
        "xla": (_DECODE,),
        "jax": (_DECODE,),
    },
    "tiny": {
        "attention": (_TINY, replace(_TINY, query_len=8)),
        "contiguous": (_TINY, replace(_TINY, query_len=40)),
        "torch": (_TINY,),
        "xla": (_TINY,),
        "jax": (_TINY,),
    },
}  # fmt: skip
"""Size -> family -> what it times, most valuable first."""

_LLAMA_8B: Final = TransformerConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, max_model_len=8192, rope_theta=500_000.0, tie_word_embeddings=False,
)  # fmt: skip
_TINY_MODEL: Final = TransformerConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_model_len=64, tie_word_embeddings=False,
)  # fmt: skip
_MODEL: Final = {"full": (_LLAMA_8B, 2048, (32, 1, 128)), "tiny": (_TINY_MODEL, 24, (2,))}  # config, context, batches


def names(size: str, implementation: str) -> dict[str, list[str]]:
    """Family -> names, most valuable first; `implementation` is what the device runs by default."""
    return {
        "limits": ["copy", "matmul"],
        "decode": list(cases(size, implementation)["decode"]),
        "prefill": list(cases(size, implementation)["prefill"]),
        **{family: [shape.name for shape in shapes] for family, shapes in SHAPES[size].items()},
        "model": [str(batch) for batch in _MODEL[size][2]],
    }


@cache
def cases(size: str, implementation: str) -> dict[str, dict[str, Case]]:
    """Pairwise cases of the contract, at most 40 and 4,096 tokens, by the kernel that they test."""
    num_geometries, count = _NUM_CASES[size]
    geometry = _TINY_GEOMETRY if size == "tiny" else KERNEL_GEOMETRIES.get(implementation, GEOMETRY)
    found: dict[str, dict[str, Case]] = {"decode": {}, "prefill": {}}
    for i, case in enumerate(sample(num_geometries, count, SEED, geometry)):
        found["decode" if case.max_query_len == 1 else "prefill"][f"case-{i}"] = case
    if size == "full":
        of_llama = partial(Case, page_size=16, num_heads=16, num_kv_heads=2, head_dim=128, dtype="bfloat16")
        found["decode"]["long"] = of_llama((1, 1, 1, 1), (4096, 1, 2049, 0), max_query_len=1)
        found["prefill"]["long"] = of_llama((300, 1, 64), (4000, 777, 64))
    return found


def check(size: str, family: str, name: str) -> dict[str, Any]:
    """Compares a case with NumPy in float64, and a poisoned pool with a clean one bit by bit."""
    implementation = default_implementation()
    started = time.perf_counter()
    case = cases(size, implementation)[family][name]
    error = None
    try:
        assert_contract(case, implementation)
    except AssertionError as wrong:
        error = str(wrong)
    row = {"name": name, "seconds": round(time.perf_counter() - started, 2), "seed": SEED}
    return row if error is None else row | {"error": error}


def limit(size: str, family: str, name: str) -> dict[str, Any]:
    """What the device can do: bytes a second of a copy, read and written; operations a second of a product."""
    tiny = size == "tiny"
    if name == "copy":
        x = jnp.arange(2**18 if tiny else 2**29, dtype=jnp.int32)
        amount, step = 2 * x.nbytes, jax.jit(lambda x: x + 1, donate_argnums=0)
        seconds = _seconds_of_steps(step, x)
    else:
        n = 128 if tiny else 8192
        a, b = (timings.normal(seed, (n, n), "bfloat16") for seed in (0, 1))
        amount, product = 2 * n**3, jax.jit(jnp.dot)
        seconds = _seconds_of_steps(lambda _: product(a, b), None)
    device = jax.devices()[0]
    return {
        "name": name, "rate": amount / seconds, "platform": device.platform, "device": device.device_kind,
        "implementation": default_implementation(), "jax": jax.__version__,
    }  # fmt: skip


def timing(function: Callable[[Shape], dict[str, Any]]) -> Family:
    """The family that times its shapes by a function of `timings`."""

    def row(size: str, family: str, name: str) -> dict[str, Any]:
        (shape,) = (shape for shape in SHAPES[size][family] if shape.name == name)
        return function(shape)

    return row


def model_step(size: str, family: str, name: str) -> dict[str, Any]:
    """A decode step of a whole model, greedy, `name` sequences; "bytes" is what it must read: weights, keys, values."""
    config, context, _ = _MODEL[size]
    batch_size, page_size = int(name), 16
    model = functional(config, unroll_layers=True)
    shapes = jax.eval_shape(partial(random_params, config, dtype=jnp.bfloat16))
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    pages_per_seq = -(-context // page_size)
    layout = model.kv_layout(num_pages=batch_size * pages_per_seq + 1, page_size=page_size, dtype=jnp.bfloat16)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is not None and weight_bytes + layout.pool_bytes > 0.9 * memory:
        return {"name": name, "skipped": f"{(weight_bytes + layout.pool_bytes) / 1e9:.0f} GB do not fit"}

    ids = 1 + np.random.default_rng(0).permutation(layout.num_pages - 1).astype(np.int32)
    tables = jnp.asarray(ids.reshape(batch_size, pages_per_seq))
    ones = jnp.ones(batch_size, jnp.int32)
    batch = batches.decode(tables, ones * (context - 1), ones, page_size=page_size)
    batch = replace(batch, implementation=default_implementation())  # by name: nothing else may run in its place
    rows, *tail = layout.pages_shape
    kv = KVPages(layout=layout, pages=timings.pool(rows, tuple(tail), jnp.bfloat16), scales=None)

    def step(params: Any, token_ids: Array, batch: Any, kv: Any) -> tuple[Array, Any]:
        hidden, kv = model(params, token_ids, batch, kv)
        return jnp.argmax(model.logits(params, hidden), axis=-1).astype(jnp.int32), kv

    params, token_ids = _params(config), jnp.arange(batch_size, dtype=jnp.int32)
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=3).lower(params, token_ids, batch, kv).compile()
    compiling = time.perf_counter() - started
    seconds = _seconds_of_steps(lambda state: compiled(params, state[0], batch, state[1]), (token_ids, kv))
    read = weight_bytes - shapes["embed"].size * 2 + batch_size * context * layout.bytes_per_token
    return {"name": name, "seconds": seconds, "bytes": read, "compile_seconds": compiling}


@cache
def _params(config: TransformerConfig) -> Any:
    return random_params(config, dtype=jnp.bfloat16)


def _seconds_of_steps(step: Callable[[Any], Any], state: Any, repeats: int = 10) -> float:
    """Median seconds of `state = step(state)`, many started before the first is waited for."""
    state, times = jax.block_until_ready(step(state)), []
    for _ in range(timings.CALLS):
        started = time.perf_counter()
        for _ in range(repeats):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times)


FAMILIES: Final[Mapping[str, Family]] = {
    "limits": limit,
    "decode": check,
    "prefill": check,
    "attention": timing(timings.paged),
    "model": model_step,
    "contiguous": timing(timings.contiguous),
    "torch": timing(timings.torch),
    "xla": timing(partial(timings.paged, implementation="xla")),
    "jax": timing(timings.jax_kernel),
}
"""Family -> what gives the row of a name, called as `f(size, family, name)`; most valuable first."""


def main(size: str, family: str, *names: str) -> None:
    """Prints a row for each name."""
    if size == "full" and jax.default_backend() == "cpu":
        sys.exit("RuntimeError: JAX finds neither a GPU nor a TPU here")
    for name in names:
        print(json.dumps(FAMILIES[family](size, family, name)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
