"""The engine as a whole: tokens per second, what its host side adds to a step, what it compiles, the page's size."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models import registry
from models.registry import Checkpoint
from models.transformer import functional
from paged_jax import Batch, Engine, EngineConfig, KVLayout, Request, block_tables, page_pool, size_pool
from paged_jax.layout import ceil_div
from scripts.benchmarks.floor import Chunk, Floor
from scripts.benchmarks.products import products
from scripts.benchmarks.timing import REPEATS, interleave, paged_step, time_call
from scripts.command_line import DTYPES, KV_DTYPES
from scripts.compare.loads import Requests, plain
from scripts.lengths import SHAREGPT

_PROMPT_LEN = 16


def throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Output tokens per second of whole runs, and of their decode steps alone."""

    def serve(checkpoint: Checkpoint, dtype: str, load: Requests) -> Callable[[], tuple[float, float]]:
        model = functional(checkpoint.config)
        config = EngineConfig(max_seqs=len(load), max_model_len=256)
        layout = model.kv_layout(num_pages=2, page_size=args.page_size, dtype=KV_DTYPES[args.kv_dtype or dtype])
        layout = size_pool(model, checkpoint.params, layout, config)
        engine = Engine(model, checkpoint.params, layout, checkpoint.tokenizer, config)
        requests = [Request(prompt, max_tokens=count, ignore_eos=True) for prompt, count in load]

        def run() -> tuple[float, float]:
            tokens, seconds = engine.stats.decode_tokens, engine.stats.decode_seconds
            elapsed = time_call(lambda: engine.generate(requests))
            decode = (engine.stats.decode_tokens - tokens) / (engine.stats.decode_seconds - seconds)
            return len(load) * args.new_tokens / elapsed, decode

        return run

    runs: dict[tuple[str, int], Callable[[], tuple[float, float]]] = {}
    floors = {}
    for dtype in args.dtypes:
        checkpoint = registry.load(args.model, dtype=DTYPES[dtype])
        least = Floor.here(checkpoint.config, DTYPES[dtype])
        for num_seqs in args.sequences:
            load = plain(checkpoint.tokenizer.encode, num_seqs, args.new_tokens)
            runs[dtype, num_seqs] = serve(checkpoint, dtype, load)
            floors[dtype, num_seqs] = num_seqs * args.new_tokens / least.load(load)
    return [
        {
            "dtype": dtype,
            "sequences": num_seqs,
            "tokens/s": statistics.median(total for total, _ in results),
            "decode tokens/s": statistics.median(decode for _, decode in results),
            "floor tokens/s": floors[dtype, num_seqs],
        }
        for (dtype, num_seqs), results in interleave(runs, args.rounds).items()
    ]


class _NoModel:
    """The model contract with nothing behind it: what is left of a step is the engine."""

    def __call__(self, params: Any, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
        return token_ids.astype(jnp.float32)[:, None], kv

    def logits(self, params: Any, hidden: Array) -> Array:
        return hidden * jnp.ones(8, jnp.float32)


def overhead(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a decode step whose model computes nothing, all sequences running: in a call of its own, and in
    one call with as many others as the engine lets follow one another."""
    rows = []
    for num_seqs in args.sequences:
        engine = _empty_engine(num_seqs, args.steps, args.page_size)
        most = engine.config.decode_steps
        run, run_many = (_Decoding(engine, num_seqs, args.steps, max_steps=steps) for steps in (1, most))
        run()
        times = [run() for _ in range(args.steps)]
        run.stop()
        run_many()
        in_one_call = [run_many() for _ in range(ceil_div(args.steps, most))]
        rows.append(
            {
                "sequences": num_seqs,
                "median ms": statistics.median(times),
                "p99 ms": float(np.percentile(times, 99)),
                f"median ms, {most} a call": statistics.median(in_one_call),
                "steps": len(times),
            }
        )
    return rows


def parts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A decode step of the engine beside what it consists of, each measured alone in interleaved rounds: the model's
    step, the allocator's call, and the rest of the host's side (a step without a model, less the allocator's call).

    Of the model's step, its products with the weights are measured too, and its floor is told."""
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    model = functional(checkpoint.config)
    least = Floor.here(checkpoint.config, DTYPES[args.dtype])
    rows = []
    for num_seqs in args.sequences:
        max_len = _PROMPT_LEN + args.new_tokens
        config = EngineConfig(max_seqs=num_seqs, max_model_len=max_len, max_tokens_per_step=max(64, 2 * num_seqs))
        layout = model.kv_layout(num_pages=num_seqs * ceil_div(max_len, args.page_size) + 1, page_size=args.page_size,
                                 dtype=DTYPES[args.dtype])  # fmt: skip
        engine = Engine(model, checkpoint.params, layout, None, config)
        whole = _Decoding(engine, num_seqs, args.new_tokens)
        empty = _Decoding(_empty_engine(num_seqs, args.new_tokens, args.page_size), num_seqs, args.new_tokens)
        runs: dict[str, Callable[[], float]] = {
            "engine": partial(_mean, whole),
            "model": paged_step(checkpoint, args.dtype, num_seqs=num_seqs, context=max_len // 2, table_tokens=max_len,
                                pool_tokens=max_len, page_size=args.page_size),
            "products": partial(_mean, products(checkpoint.params, num_seqs)),
            "allocator": _allocator_call(layout, num_seqs, max_len),
            "no model": partial(_mean, empty),
        }  # fmt: skip
        ms = {name: statistics.median(values) for name, values in interleave(runs, args.rounds).items()}
        total = ms["model"] + ms["no model"]
        rows.append(
            {
                "sequences": num_seqs,
                "engine ms": ms["engine"],
                "model ms": ms["model"],
                "products ms": ms["products"],
                "floor ms": 1e3 * least.step([Chunk(max_len // 2 - 1)] * num_seqs),
                "allocator ms": ms["allocator"],
                "rest of the host ms": ms["no model"] - ms["allocator"],
                "sum ms": total,
                "engine / sum": ms["engine"] / total,
            }
        )
    return rows


def compilations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Programs that `warm_up` compiles, and those that a mixed load compiles afterwards (none)."""
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    model = functional(checkpoint.config)
    rows = []
    for num_seqs in args.sequences:
        config = EngineConfig(max_seqs=num_seqs, max_model_len=256, max_tokens_per_step=max(256, num_seqs))
        layout = size_pool(model, checkpoint.params, model.kv_layout(num_pages=2), config)
        engine = Engine(model, checkpoint.params, layout, None, config)
        seconds = time_call(engine.warm_up)
        compiled = engine.metrics().num_compilations
        engine.generate(made_requests(2 * num_seqs, shrink=16, vocab_size=checkpoint.config.vocab_size, seed=0))
        rows.append(
            {
                "sequences": num_seqs,
                "programs": compiled,
                "seconds": seconds,
                "compiled while serving": engine.metrics().num_compilations - compiled,
            }
        )
    return rows


def page_size(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second and internal waste of the same load for several sizes of the page."""
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    model = functional(checkpoint.config)
    requests = made_requests(args.requests, shrink=args.shrink, vocab_size=checkpoint.config.vocab_size, seed=args.seed)
    longest = max(len(request.prompt) + (request.max_tokens or 0) for request in requests)
    config = EngineConfig(max_seqs=args.max_seqs, max_model_len=longest, prefix_caching=False)
    engines = {}
    for size in args.sizes:
        layout = model.kv_layout(num_pages=2, page_size=size, dtype=DTYPES[args.dtype])
        layout = size_pool(model, checkpoint.params, layout, config)
        engines[size] = Engine(model, checkpoint.params, layout, None, config)
    runs = {size: partial(_rates, engine, requests) for size, engine in engines.items()}
    return [
        {
            "page size": size,
            "tokens/s": statistics.median(total for total, _ in results),
            "decode ms a token": statistics.median(step for _, step in results),
            "peak MiB": engines[size].stats.peak_pages * engines[size].layout.bytes_per_page / 2**20,
            "internal waste %": 100 * engines[size].stats.internal_waste,
        }
        for size, results in interleave(runs, args.rounds).items()
    ]


def made_requests(count: int, *, shrink: int, vocab_size: int, seed: int) -> list[Request]:
    """Requests of random tokens with ShareGPT-like lengths, all divided by `shrink`; greedy, nothing shared."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, vocab_size, ceil_div(lengths.prompt, shrink)).tolist(),
            max_tokens=ceil_div(lengths.output, shrink),
            ignore_eos=True,
        )
        for lengths in SHAREGPT.draw(count, max_len=2048, seed=seed)
    ]


def _rates(engine: Engine, requests: Sequence[Request]) -> tuple[float, float]:
    """Output tokens per second, and milliseconds of a token in decode steps."""
    before = replace(engine.stats)
    seconds = time_call(lambda: engine.generate(requests))
    stats = engine.stats
    decode = (stats.decode_seconds - before.decode_seconds) / (stats.decode_tokens - before.decode_tokens)
    return sum(request.max_tokens or 0 for request in requests) / seconds, decode * 1e3


def _mean(step: Callable[[], float]) -> float:
    return statistics.fmean(step() for _ in range(REPEATS))


def _empty_engine(num_seqs: int, new_tokens: int, page_size: int) -> Engine:
    max_len = _PROMPT_LEN + new_tokens
    config = EngineConfig(max_seqs=num_seqs, max_model_len=max_len, max_tokens_per_step=max(64, 2 * num_seqs))
    layout = KVLayout(1, num_seqs * ceil_div(max_len, page_size) + 1, page_size, 1, 2)
    engine = Engine(_NoModel(), {"none": jnp.zeros(1)}, layout, None, config)
    engine.warm_up()
    return engine


class _Decoding:
    """Decode steps of an engine with all sequences running.

    Args:
      engine: an idle engine.
      num_seqs: sequences.
      max_tokens: tokens that each generates before they begin anew.
      max_steps: steps a call.
    """

    def __init__(self, engine: Engine, num_seqs: int, max_tokens: int, *, max_steps: int = 1) -> None:
        rng = np.random.default_rng(0)
        self._engine, self._num_seqs, self._max_steps = engine, num_seqs, max_steps
        self._requests = [Request(rng.integers(0, 8, _PROMPT_LEN).tolist(), max_tokens) for _ in range(num_seqs)]
        self._running: list[int] = []

    def __call__(self) -> float:
        """Makes a call and returns its milliseconds, divided by the tokens that each sequence gets."""
        if not self._running:
            self._running = [self._engine.add_request(request) for request in self._requests]
            while len(self._engine.step()) < self._num_seqs:
                pass  # prompts
        started = time.perf_counter()
        events = self._engine.step(max_steps=self._max_steps)
        elapsed = time.perf_counter() - started
        if any(event.finish_reason is not None for event in events):
            self.stop()
        return elapsed * 1e3 * self._num_seqs / len(events)

    def stop(self) -> None:
        """Ends what runs."""
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running = []


def _allocator_call(layout: KVLayout, num_seqs: int, max_len: int) -> Callable[[], float]:
    """A function that makes room for a token of every row on the host, reads the result back, and returns its
    milliseconds."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        tables = block_tables.create(num_seqs, layout.pages_for(max_len))
        pool = page_pool.create(layout.num_pages)
        active = np.ones(num_seqs, bool)
        grow = jax.jit(block_tables.append_decode, static_argnames="page_size")

        def run() -> float:
            started = time.perf_counter()
            for _ in range(REPEATS):
                jax.block_until_ready(grow(tables, pool, active, page_size=layout.page_size))
            return (time.perf_counter() - started) / REPEATS * 1e3

    return run
