"""How much of a load fits in a given budget for keys and values: pages beside a contiguous cache."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models import registry
from models.transformer import functional
from paged_jax import Engine, EngineConfig
from scripts.benchmarks.contiguous import ContiguousServer
from scripts.benchmarks.serving import made_requests
from scripts.benchmarks.timing import interleave, time_call
from scripts.command_line import DTYPES


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Sequences at once and output tokens per second of the same ShareGPT-like load out of the same bytes: reserved a
    sequence at its longest, and in pages.

    Raises:
      ValueError: the budget does not hold one sequence of the longest context.
    """
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    model = functional(checkpoint.config)
    layout = model.kv_layout(num_pages=2, page_size=args.page_size, dtype=DTYPES[args.dtype])
    budget, longest = args.budget_mib * 2**20, 2048 // args.shrink
    num_rows = budget // (longest * layout.bytes_per_token)
    if num_rows < 1:
        raise ValueError(
            f"--budget-mib must be at least {-(-longest * layout.bytes_per_token // 2**20)}, what one sequence of "
            f"{longest} tokens needs, got {args.budget_mib}"
        )
    requests = made_requests(args.requests, shrink=args.shrink, vocab_size=checkpoint.config.vocab_size, seed=args.seed)
    layout = replace(layout, num_pages=budget // layout.bytes_per_page)
    config = EngineConfig(max_seqs=args.max_seqs, max_model_len=longest, prefix_caching=False)
    engine = Engine(model, checkpoint.params, layout, None, config)
    server = ContiguousServer(checkpoint, num_seqs=num_rows, max_len=longest, dtype=DTYPES[args.dtype])
    running: list[int] = []
    pairs = [(list(map(int, request.prompt)), request.max_tokens or 0) for request in requests]
    runs: dict[str, Callable[[], float]] = {
        "contiguous": lambda: time_call(lambda: server.generate(pairs)),
        "paged": lambda: time_call(
            lambda: engine.generate(requests, on_step=lambda: running.append(engine.metrics().num_running))
        ),
    }
    seconds = {name: statistics.median(times) for name, times in interleave(runs, args.rounds).items()}
    tokens = sum(count for _, count in pairs)
    rows: list[dict[str, Any]] = [
        {"cache": "contiguous", "most at once": num_rows, "on average": float(num_rows), "preemptions": 0},
        {
            "cache": "paged",
            "most at once": engine.stats.peak_seqs,
            "on average": statistics.fmean(running),
            "preemptions": engine.metrics().num_preemptions,
        },
    ]
    for row in rows:
        row["tokens/s"] = tokens / seconds[row["cache"]]
    ratio = {name: rows[1][name] / rows[0][name] for name in ("most at once", "on average", "tokens/s")}
    return [*rows, {"cache": "paged / contiguous", **ratio, "preemptions": ""}]
