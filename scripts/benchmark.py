"""Measures the paged cache on this machine.

throughput   the engine's tokens per second for several numbers of sequences and dtypes
contiguous   a decode step over pages beside the same model over a plain contiguous cache
overhead     what the engine's host side adds to a step: scheduling, hashing, tables, dispatch
perplexity   of a text, for several dtypes of the pages

Rounds are interleaved and medians reported: machines drift. Compilation is left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from tqdm import tqdm

from models import registry
from models.registry import Checkpoint
from models.transformer import FunctionalModel, functional
from paged_jax import Batch, Engine, EngineConfig, KVLayout, KVPages, PagedCache, Request, append, size_pool
from paged_jax import batch as batches
from paged_jax.layout import ceil_div
from scripts.command_line import (
    DTYPES,
    KV_DTYPES,
    Parser,
    check_outputs,
    exit_status,
    format_table,
    machine,
    write_json,
)

TEXT = Path(__file__).parents[1] / "tests" / "data" / "perplexity.txt"
PROMPTS = ("The capital of France is", "Once upon a time", "def fib(n):", "The quick brown")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    throughput = commands.add_parser("throughput", help="tokens per second of the engine")
    throughput.add_argument("--new-tokens", type=int, default=64, help="tokens to generate a sequence (64)")
    throughput.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the pages; by default that of the weights")
    contiguous = commands.add_parser("contiguous", help="a decode step beside a contiguous cache")
    contiguous.add_argument("--contexts", type=int, nargs="+", default=[64, 512], help="tokens cached (64 512)")
    contiguous.add_argument(
        "--max-model-len", type=int, default=2048, help="tokens that the contiguous cache reserves a sequence (2048)"
    )
    overhead = commands.add_parser("overhead", help="the engine's own time a step, with a model that computes nothing")
    overhead.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256], help="(1 32 256)")
    overhead.add_argument("--steps", type=int, default=300, help="steps to measure (300)")
    overhead.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
    overhead.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    text = commands.add_parser("perplexity", help="of a text, for several dtypes of the pages")
    text.add_argument("--text", type=Path, default=TEXT, metavar="FILE", help="UTF-8 (tests/data/perplexity.txt)")
    text.add_argument("--kv-dtypes", choices=KV_DTYPES, nargs="+", default=list(KV_DTYPES), help="of the pages (all); "
                      "changes are relative to the first")  # fmt: skip
    for command in (throughput, contiguous):
        command.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32], help="(1 8 16 32)")
        command.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    for command in (throughput, contiguous, text):
        command.add_argument("--model", default=registry.DEFAULT_MODEL, help="as for generate.py")
        command.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="of the weights (all)")
        command.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(argv)


def throughput(args: argparse.Namespace, checkpoints: dict[str, Checkpoint]) -> list[dict[str, Any]]:
    """Output tokens per second of whole runs, and of their decode steps alone."""

    def measure(dtype: str, num_seqs: int) -> Callable[[], tuple[float, float]]:
        checkpoint = checkpoints[dtype]
        model = functional(checkpoint.config)
        config = EngineConfig(max_seqs=num_seqs, max_model_len=256)
        layout = size_pool(
            model,
            checkpoint.params,
            model.kv_layout(num_pages=2, page_size=args.page_size, dtype=KV_DTYPES[args.kv_dtype or dtype]),
            config,
        )
        engine = Engine(model, checkpoint.params, layout, checkpoint.tokenizer, config)
        requests = [
            Request(PROMPTS[i % len(PROMPTS)], max_tokens=args.new_tokens, ignore_eos=True) for i in range(num_seqs)
        ]

        def run() -> tuple[float, float]:
            tokens, seconds = engine.stats.decode_tokens, engine.stats.decode_seconds
            started = time.perf_counter()
            engine.generate(requests)
            elapsed = time.perf_counter() - started
            decode = (engine.stats.decode_tokens - tokens) / (engine.stats.decode_seconds - seconds)
            return num_seqs * args.new_tokens / elapsed, decode

        return run

    cases = [(dtype, num_seqs) for dtype in args.dtypes for num_seqs in args.sequences]
    results = _interleave({case: measure(*case) for case in cases}, args.rounds)
    return [
        {
            "dtype": dtype,
            "sequences": num_seqs,
            "tokens/s": statistics.median(total for total, _ in results[dtype, num_seqs]),
            "decode tokens/s": statistics.median(decode for _, decode in results[dtype, num_seqs]),
        }
        for dtype, num_seqs in cases
    ]


class _NoModel:
    """The model contract with nothing behind it: what is left of a step is the engine."""

    def __call__(self, params: Any, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
        return token_ids.astype(jnp.float32)[:, None], kv

    def logits(self, params: Any, hidden: Array) -> Array:
        return hidden * jnp.ones(8, jnp.float32)


def overhead(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a decode step whose model computes nothing, all sequences running."""
    rows = []
    for num_seqs in args.sequences:
        max_len = 64 + args.steps + 1
        config = EngineConfig(max_seqs=num_seqs, max_model_len=max_len, max_tokens_per_step=max(64, 2 * num_seqs))
        layout = KVLayout(1, num_seqs * ceil_div(max_len, args.page_size) + 1, args.page_size, 1, 2)
        engine = Engine(_NoModel(), {"none": jnp.zeros(1)}, layout, None, config)
        engine.warm_up()
        rng = np.random.default_rng(0)
        for _ in range(num_seqs):
            engine.add_request(Request(rng.integers(0, 8, 64).tolist(), max_tokens=args.steps))
        while len(engine.step()) < num_seqs:
            pass  # prompts
        times = []
        for _ in range(args.steps - 64):
            started = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - started) * 1e3)
        rows.append(
            {
                "sequences": num_seqs,
                "median ms": statistics.median(times),
                "p99 ms": float(np.percentile(times, 99)),
                "steps": len(times),
            }
        )
    return rows


def contiguous(args: argparse.Namespace, checkpoints: dict[str, Checkpoint]) -> list[dict[str, Any]]:
    """Milliseconds of a decode step: over pages; over a contiguous cache just long enough; over one that reserves
    max_model_len. The ratios are medians of the rounds' ratios."""
    rows = []
    for dtype in args.dtypes:
        for num_seqs in args.sequences:
            for context in args.contexts:
                tight = _round_up(context, args.page_size)
                steps = {
                    "paged": _paged_step(checkpoints[dtype], num_seqs, context, args.page_size, dtype),
                    "tight": _contiguous_step(checkpoints[dtype], num_seqs, context, tight, dtype),
                    "reserved": _contiguous_step(checkpoints[dtype], num_seqs, context, args.max_model_len, dtype),
                }
                results = _interleave(steps, args.rounds)
                row: dict[str, Any] = {"dtype": dtype, "sequences": num_seqs, "context": context}
                row |= {f"{name} ms": statistics.median(times) for name, times in results.items()}
                for name in ("tight", "reserved"):
                    pairs = zip(results["paged"], results[name], strict=True)
                    row[f"paged/{name}"] = statistics.median(paged / other for paged, other in pairs)
                rows.append(row)
    return rows


def perplexity(args: argparse.Namespace, checkpoints: dict[str, Checkpoint]) -> list[dict[str, Any]]:
    """exp of the text's mean negative log-likelihood a token, and its change from the first dtype of the pages."""
    rows = []
    for dtype, checkpoint in checkpoints.items():
        token_ids = checkpoint.tokenizer.encode(args.text.read_text(encoding="utf-8"))
        first = None
        for kv_dtype in tqdm(args.kv_dtypes, desc=dtype, disable=None, leave=False):
            loss = negative_log_likelihood(checkpoint, token_ids, KV_DTYPES[kv_dtype], page_size=args.page_size)
            first = loss if first is None else first
            row = {"weights": dtype, "pages": kv_dtype, "tokens": len(token_ids), "perplexity": f"{np.exp(loss):.4f}"}
            rows.append(row | {"change": f"{np.expm1(loss - first):+.3%}"})
    return rows


def negative_log_likelihood(
    checkpoint: Checkpoint, token_ids: Sequence[int], kv_dtype: DTypeLike, *, page_size: int = 16, chunk: int = 128
) -> float:
    """Mean over all tokens but the first, in nats; every key and value is read from pages of `kv_dtype`."""
    model = functional(checkpoint.config)
    given, targets = np.asarray(token_ids[:-1], np.int32), np.asarray(token_ids[1:], np.int32)
    pages_per_seq = ceil_div(len(given), page_size)
    layout = model.kv_layout(num_pages=pages_per_seq + 1, page_size=page_size, dtype=kv_dtype)
    cache = PagedCache.create(layout, max_seqs=1, pages_per_seq=pages_per_seq)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, cache: PagedCache, given: Array, targets: Array, count: Array) -> tuple[PagedCache, Array]:
        cache, batch, _ = append(cache, count[None], num_tokens=chunk)
        hidden, kv = model(params, given, batch, cache.kv)
        scores = jax.nn.log_softmax(model.logits(params, hidden), axis=-1)
        scores = jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
        is_token = jnp.arange(chunk, dtype=jnp.int32) < count
        return replace(cache, kv=kv), jnp.where(is_token, -scores, 0.0).sum()

    total = 0.0
    for start in range(0, len(given), chunk):
        count = min(chunk, len(given) - start)
        inputs = [jnp.asarray(np.pad(x[start : start + count], (0, chunk - count))) for x in (given, targets)]
        cache, loss = step(checkpoint.params, cache, *inputs, jnp.int32(count))
        total += float(loss)
    return total / len(given)


def contiguous_attention(
    q: Array,
    k: Array,
    v: Array,
    kv: Any,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> tuple[Array, Any]:
    """Decode over a plain cache: for each layer keys and values [num_seqs, num_kv_heads, max_len, head_dim]."""
    keys, values = kv[layer]
    row = jnp.arange(q.shape[0])
    keys = keys.at[row, :, batch.positions].set(k)
    values = values.at[row, :, batch.positions].set(v)
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32) * scale
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    position, query = jnp.arange(keys.shape[2]), batch.positions[:, None]
    visible = position <= query
    if sliding_window is not None:
        visible &= position > query - sliding_window
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgs,bksd->bkgd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype), (*kv[:layer], (keys, values), *kv[layer + 1 :])


def _paged_step(checkpoint: Checkpoint, num_seqs: int, context: int, page_size: int, dtype: str) -> Callable[[], float]:
    model = functional(checkpoint.config)
    pages_per_seq = ceil_div(context, page_size)
    layout = model.kv_layout(num_pages=num_seqs * pages_per_seq + 1, page_size=page_size, dtype=DTYPES[dtype])
    page_ids = np.random.default_rng(0).permutation(np.arange(1, layout.num_pages, dtype=np.int32))
    tables = jnp.asarray(page_ids.reshape(num_seqs, pages_per_seq))
    return _timed_step(model, checkpoint, _decode_batch(tables, context, page_size), KVPages.create(layout))


def _contiguous_step(
    checkpoint: Checkpoint, num_seqs: int, context: int, max_len: int, dtype: str
) -> Callable[[], float]:
    config = checkpoint.config
    # Unrolled: a loop over layers would have to slice, and so copy, a stacked cache.
    model = functional(config, attention=contiguous_attention, unroll_layers=True)
    shape = (num_seqs, config.num_kv_heads, max_len, config.head_dim)
    kv = tuple((jnp.zeros(shape, DTYPES[dtype]), jnp.zeros(shape, DTYPES[dtype])) for _ in range(config.num_layers))
    return _timed_step(model, checkpoint, _decode_batch(jnp.zeros((num_seqs, 1), jnp.int32), context, max_len), kv)


def _decode_batch(tables: Array, context: int, page_size: int) -> Batch:
    num_seqs = tables.shape[0]
    lens = jnp.full(num_seqs, context - 1, jnp.int32)
    return batches.decode(tables, lens, jnp.ones(num_seqs, jnp.int32), page_size=page_size)


def _timed_step(model: FunctionalModel, checkpoint: Checkpoint, batch: Batch, kv: Any) -> Callable[[], float]:
    """A function that runs one decode step and returns its milliseconds."""

    @partial(jax.jit, donate_argnums=3)
    def step(params: Any, token_ids: Array, batch: Batch, kv: Any) -> tuple[Array, Any]:
        hidden, kv = model(params, token_ids, batch, kv)
        return jnp.argmax(model.logits(params, hidden[batch.logit_rows]), axis=-1).astype(jnp.int32), kv

    token_ids = jnp.zeros(batch.positions.shape, jnp.int32)
    state = [kv]

    def run(repeats: int = 5) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            tokens, state[0] = step(checkpoint.params, token_ids, batch, state[0])
            tokens.block_until_ready()
        return (time.perf_counter() - started) / repeats * 1e3

    return run


def _interleave(cases: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[Any]]:
    for run in cases.values():
        run()  # compiles
    results: dict[Any, list[Any]] = {name: [] for name in cases}
    for _ in tqdm(range(rounds), desc="rounds", disable=None, leave=False):
        for name, run in cases.items():
            results[name].append(run())
    return results


def _round_up(number: int, multiple: int) -> int:
    return ceil_div(number, multiple) * multiple


def run(args: argparse.Namespace) -> None:
    """Runs one measurement and prints its table."""
    check_outputs(args.json)
    if args.command == "overhead":
        rows = overhead(args)
    else:
        checkpoints = {dtype: registry.load(args.model, dtype=DTYPES[dtype]) for dtype in args.dtypes}
        commands = {"throughput": throughput, "contiguous": contiguous, "perplexity": perplexity}
        rows = commands[args.command](args, checkpoints)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(format_table(rows))
    if args.json is not None:
        write_json(args.json, args.command, rows=rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
