"""The floor: what a machine could do at best, from bytes and operations that no implementation of a model can avoid.

A step reads every weight, and every cached key and value that its queries see, once, and writes the new ones. It
multiplies each token by the layers' weights, each row of logits by the head, and each query by its keys and values. It
takes at least the longer of the times for the two, at the rates that this machine reaches.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models import registry
from models.config import TransformerConfig
from paged_jax.prefix import common_length
from scripts.benchmarks.timing import time_call
from scripts.command_line import DTYPES
from scripts.compare.loads import LOADS, Requests

_TRIES = 5


class Rates(NamedTuple):
    """What the machine reaches: bytes a second of a matrix that is read once, operations a second of large products."""

    bytes: float
    operations: float


class Chunk(NamedTuple):
    """Tokens of one sequence that a step computes, and how many are cached before them."""

    cached: int
    computed: int = 1


def measure(dtype: DTypeLike) -> Rates:
    """The rates of this machine, the best of several tries: a float32 matrix of 256 MiB times 8 vectors, and a product
    of two square matrices of dtype."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    product = jax.jit(jnp.matmul)
    matrix, columns, square = jnp.ones((2**15, 2**11)), jnp.ones((2**11, 8)), jnp.ones((side, side), dtype)
    return Rates(
        bytes=matrix.nbytes / _fastest(lambda: product(matrix, columns)),
        operations=2 * side**3 / _fastest(lambda: product(square, square)),
    )


class Floor:
    """The least times of a model.

    Args:
      config: its shapes.
      dtype: of weights, keys and values.
      rates: of the machine.
    """

    def __init__(self, config: TransformerConfig, dtype: DTypeLike, rates: Rates) -> None:
        self.rates = rates
        self._itemsize = jnp.dtype(dtype).itemsize
        self._query_size = config.num_heads * config.head_dim
        self._kv_size = 2 * config.num_kv_heads * config.head_dim
        projections = 2 * self._query_size + self._kv_size + 3 * config.intermediate_size
        self._layers = config.num_layers * config.hidden_size * projections
        self._head = config.vocab_size * config.hidden_size
        self._windows = Counter(config.sliding_windows or (None,) * config.num_layers)

    @classmethod
    def here(cls, config: TransformerConfig, dtype: DTypeLike) -> "Floor":
        """That of this machine, which is measured."""
        return cls(config, dtype, measure(dtype))

    def step(self, chunks: Sequence[Chunk], shared: int = 0) -> float:
        """Seconds of a step with a row of logits for each sequence.

        Args:
          chunks: what it computes.
          shared: leading tokens that all sequences have in common, and that are read once for all.
        """
        tokens = sum(chunk.computed for chunk in chunks)
        read, seen = 0.0, 0.0
        for window, layers in self._windows.items():
            longest = float("inf") if window is None else window
            cached = sum(min(chunk.cached, longest - 1) for chunk in chunks)
            read += layers * max(0, cached - (len(chunks) - 1) * min(shared, longest - 1))
            seen += layers * sum(min(chunk.cached + i + 1, longest) for chunk in chunks for i in range(chunk.computed))
        written = tokens * sum(self._windows.values())
        moved = self._itemsize * (self._layers + self._head + self._kv_size * (read + written))
        operations = 2 * (self._layers * tokens + self._head * len(chunks)) + 4 * self._query_size * seen
        return max(moved / self.rates.bytes, operations / self.rates.operations)

    def load(self, requests: Requests) -> float:
        """Seconds of a whole load of (prompt, tokens to generate), all at once: what all prompts begin with is computed
        once, all prompts make one step, and then every request that is not done gets a token in each."""
        prompts = [prompt for prompt, _ in requests]
        first, *others = prompts
        shared = min((common_length(first, prompt) for prompt in others), default=0)
        shared = min(shared, *(len(prompt) - 1 for prompt in prompts))
        prefill = [Chunk(0, len(first)), *(Chunk(shared, len(prompt) - shared) for prompt in others)]
        least = self.step(prefill, shared)
        for made in range(1, max(count for _, count in requests)):
            least += self.step([Chunk(len(p) + made - 1) for p, count in requests if count > made], shared)
        return least


def floor(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second that no implementation can exceed on this machine, for the loads of compare_torch.py, and the
    rates that they follow from."""
    rows = []
    for dtype in args.dtypes:
        checkpoint = registry.load(args.model, dtype=DTYPES[dtype])
        least = Floor.here(checkpoint.config, DTYPES[dtype])
        for name, load in LOADS.items():
            requests = load(checkpoint.tokenizer.encode)
            rows.append(
                {
                    "dtype": dtype,
                    "GB/s": least.rates.bytes / 1e9,
                    "GFLOP/s": least.rates.operations / 1e9,
                    "load": name,
                    "floor tokens/s": sum(count for _, count in requests) / least.load(requests),
                }
            )
    return rows


def _fastest(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()
    return min(time_call(lambda: run().block_until_ready()) for _ in range(_TRIES))
