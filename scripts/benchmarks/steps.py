"""Milliseconds of single steps: decode over context, table and pool; prefill; pages beside a contiguous cache."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import registry
from paged_jax.layout import ceil_div
from scripts.benchmarks.contiguous import contiguous_step
from scripts.benchmarks.floor import Chunk, Floor
from scripts.benchmarks.timing import interleave, medians, paged_step
from scripts.command_line import DTYPES

VARIED = ("context", "table width", "pool size")


def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A decode step while one of context, table and pool grows, in tokens a sequence; the others stay.

    While the context grows, table and pool have room for the longest one. While the table grows, the context is the
    shortest one and the pool has room for the longest. While the pool grows, the context is the shortest one and the
    table has room for the longest; a pool never holds less than the context.
    """
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    short, long = min(args.contexts), max(args.contexts)
    sizes = {
        "context": lambda tokens: {"context": tokens, "table_tokens": long, "pool_tokens": long},
        "table width": lambda tokens: {"context": short, "table_tokens": tokens, "pool_tokens": long},
        "pool size": lambda tokens: {"context": short, "table_tokens": long, "pool_tokens": tokens},
    }
    runs = {
        (varied, tokens): paged_step(
            checkpoint, args.dtype, num_seqs=args.sequences, page_size=args.page_size, **sizes[varied](tokens)
        )
        for varied in VARIED
        for tokens in args.contexts
    }
    least = Floor.here(checkpoint.config, DTYPES[args.dtype])
    return [
        {
            "sequences": args.sequences,
            "varied": varied,
            "tokens a sequence": tokens,
            "ms": ms,
            "floor ms": 1e3 * least.step([Chunk((tokens if varied == "context" else short) - 1)] * args.sequences),
        }
        for (varied, tokens), ms in medians(runs, args.rounds).items()
    ]


def plot_decode(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the rows of `decode`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for varied, marker in zip(VARIED, "osD", strict=True):
        points = [(row["tokens a sequence"], row["ms"]) for row in rows if row["varied"] == varied]
        axes.plot(*zip(*points, strict=True), marker=marker, label=varied)
    ticks = sorted({row["tokens a sequence"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens a sequence")
    axes.set_ylabel("decode step, ms")
    axes.set_title(f"{rows[0]['sequences']} sequences: only the real context costs")
    axes.grid(alpha=0.3)
    axes.legend(title="what grows")
    figure.savefig(path, dpi=120)


def prefill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A step that computes a chunk of one prompt, behind tokens that are cached already."""
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    runs = {
        (cached, chunk): paged_step(
            checkpoint, args.dtype, num_seqs=1, context=cached + chunk, chunk=chunk, page_size=args.page_size
        )
        for cached in args.cached
        for chunk in args.chunks
    }
    least = Floor.here(checkpoint.config, DTYPES[args.dtype])
    return [
        {
            "cached": cached,
            "chunk": chunk,
            "ms": ms,
            "floor ms": 1e3 * least.step([Chunk(cached, chunk)]),
            "tokens/s": chunk / ms * 1e3,
        }
        for (cached, chunk), ms in medians(runs, args.rounds).items()
    ]


def contiguous(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A decode step over pages; over a contiguous cache just long enough; over one that reserves max_model_len. The
    ratios are medians of the rounds' ratios."""
    rows = []
    for dtype in args.dtypes:
        checkpoint = registry.load(args.model, dtype=DTYPES[dtype])
        least = Floor.here(checkpoint.config, DTYPES[dtype])
        for num_seqs in args.sequences:
            for context in args.contexts:
                tight = ceil_div(context, args.page_size) * args.page_size
                case = {"num_seqs": num_seqs, "context": context}
                runs = {
                    "paged": paged_step(checkpoint, dtype, page_size=args.page_size, **case),
                    "tight": contiguous_step(checkpoint, dtype, max_len=tight, **case),
                    "reserved": contiguous_step(checkpoint, dtype, max_len=args.max_model_len, **case),
                }
                results = interleave(runs, args.rounds)
                row: dict[str, Any] = {"dtype": dtype, "sequences": num_seqs, "context": context}
                row |= {f"{name} ms": statistics.median(times) for name, times in results.items()}
                row["floor ms"] = 1e3 * least.step([Chunk(context - 1)] * num_seqs)
                for name in ("tight", "reserved"):
                    pairs = zip(results["paged"], results[name], strict=True)
                    row[f"paged/{name}"] = statistics.median(paged / other for paged, other in pairs)
                rows.append(row)
    return rows
