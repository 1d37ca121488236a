"""Replays a trace of requests through the engine and says what users would have felt.

A trace is a JSONL file, a request a line: {"arrival": seconds, "prompt": "..." or "token_ids": [...], "max_tokens": 32,
"n": 1, "cache_salt": null, "follows": null}. A request that follows another (the first is 0) continues its prompt
and answer with its own tokens, `arrival` seconds after that answer has ended: the next turn of a chat. Without --trace
one is made by --make. With --time virtual the clock skips the waits for the next arrival; --time real sleeps.

Caching on and off, and several sizes of the pool, are compared in one run over the same trace.
"""

import argparse
import heapq
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from models import registry
from models.registry import Checkpoint
from models.transformer import functional
from paged_jax import Engine, EngineConfig, KVLayout, Request, size_pool
from scripts.command_line import DTYPES, Parser, check_outputs, exit_status, write_json
from scripts.traces import TRACES, TraceRequest, make_trace, read_trace


@dataclass
class Served:
    """What became of a request.

    Attributes:
      arrival: seconds since the start.
      prompt: its tokens; empty if it was rejected before they were known.
      times: seconds since the start of each token, a list for each sample.
      answer: tokens of its first sample.
      rejected: why it was refused, else None.
    """

    arrival: float
    prompt: list[int] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    rejected: str | None = None


class Clock:
    """Seconds since the start.

    Args:
      real: wait by sleeping; else waits are skipped and the clock set forward.
    """

    def __init__(self, *, real: bool) -> None:
        self._real = real
        self._start = time.perf_counter()

    def now(self) -> float:
        """The time."""
        return time.perf_counter() - self._start

    def wait_until(self, moment: float) -> None:
        """Nothing is left to do before `moment`."""
        left = moment - self.now()
        if left <= 0:
            return
        if self._real:
            time.sleep(left)
        else:
            self._start -= left


def replay(
    engine: Engine, trace: Sequence[TraceRequest], clock: Clock, encode: Callable[[str], list[int]]
) -> list[Served]:
    """Serves a trace; an answer has its full length, whatever tokens come, unless the context cuts it."""
    served = [Served(request.arrival) for request in trace]
    followers: dict[int, list[int]] = {}
    due: list[tuple[float, int]] = []
    for index, request in enumerate(trace):
        if request.follows is None:
            heapq.heappush(due, (request.arrival, index))
        else:
            followers.setdefault(request.follows, []).append(index)
    running: dict[int, int] = {}
    samples_left = [request.n for request in trace]
    progress = tqdm(total=len(trace), desc="requests", disable=None, leave=False)
    while due or running:
        if not running:
            clock.wait_until(due[0][0])
        while due and due[0][0] <= clock.now():
            arrival, index = heapq.heappop(due)
            ended = _submit(engine, trace, served, index, arrival, encode, running)
            progress.update(ended)
        for event in engine.step():
            index, now = running[event.request_id], clock.now()
            record = served[index]
            record.times.setdefault(event.sample, []).append(now)
            if event.sample == 0:
                record.answer.append(event.token_id)
            samples_left[index] -= event.finish_reason is not None
            if not samples_left[index]:
                del running[event.request_id]
                progress.update()
                for follower in followers.get(index, []):
                    heapq.heappush(due, (now + trace[follower].arrival, follower))
    progress.close()
    return served


def _submit(
    engine: Engine,
    trace: Sequence[TraceRequest],
    served: list[Served],
    index: int,
    arrival: float,
    encode: Callable[[str], list[int]],
    running: dict[int, int],
) -> int:
    """Queues a request; returns how many requests ended by that: 1 if it was refused."""
    request, record = trace[index], served[index]
    record.arrival = arrival
    own = request.token_ids if request.token_ids is not None else encode(request.prompt or "")
    before = served[request.follows] if request.follows is not None else Served(0.0)
    try:
        asked = Request(
            [*before.prompt, *before.answer, *own],
            max_tokens=request.max_tokens,
            n=request.n,
            cache_salt=request.cache_salt,
            ignore_eos=True,
        )
        running[engine.add_request(asked)] = index
    except ValueError as error:
        record.rejected = str(error)
        return 1
    record.prompt = list(asked.prompt) if not isinstance(asked.prompt, str) else []
    return 0


def ideal_hits(trace: Sequence[TraceRequest], served: Sequence[Served]) -> int:
    """Prompt tokens that some request before has had in the same places: what a cache without pages or limits finds."""
    total = 0
    seen: dict[str | None, list[np.ndarray]] = {}
    for request, record in sorted(zip(trace, served, strict=True), key=lambda pair: pair[1].arrival):
        if record.rejected is not None:
            continue
        prompt = np.array(record.prompt)
        known = seen.setdefault(request.cache_salt, [])
        total += max((_common(prompt, other) for other in known), default=0)
        known.append(np.array([*record.prompt, *record.answer]))
    return total


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def summarise(
    engine: Engine, trace: Sequence[TraceRequest], served: Sequence[Served], seconds: float
) -> dict[str, Any]:
    """The figures of one run: seconds, tokens per second, shares and counts."""
    samples = [(record.arrival, times) for record in served for times in record.times.values()]
    metrics, layout = engine.metrics(), engine.layout
    prompt_tokens = sum(len(record.prompt) for record in served if record.rejected is None)
    accepted = sum(record.rejected is None for record in served)
    row: dict[str, Any] = {
        "caching": "on" if engine.config.prefix_caching else "off",
        "pages": layout.num_pages - 1,
        "pool MiB": layout.pool_bytes / 2**20,
        "peak pages": engine.stats.peak_pages,
        "headroom": 1 - engine.stats.peak_pages / (layout.num_pages - 1),
        "total s": seconds,
        "tokens/s": sum(len(times) for _, times in samples) / seconds,
        "hit rate": metrics.prefix.hit_rate,
        "ideal hit rate": ideal_hits(trace, served) / max(prompt_tokens, 1),
        "page a request": accepted * layout.page_size / max(prompt_tokens, 1),
        "preemptions": metrics.num_preemptions,
        "evictions": metrics.num_evictions,
        "rejected": len(served) - accepted,
    }
    figures = {
        "TTFT": [times[0] - arrival for arrival, times in samples],
        "TPOT": [(times[-1] - times[0]) / (len(times) - 1) for _, times in samples if len(times) > 1],
        "ITL": [b - a for _, times in samples for a, b in itertools.pairwise(times)],
        "E2E": [times[-1] - arrival for arrival, times in samples],
    }
    for name, values in figures.items():
        values = values or [float("nan")]
        row |= {
            f"{name} mean": statistics.fmean(values),
            f"{name} median": statistics.median(values),
            f"{name} p99": float(np.percentile(values, 99)),
        }
    memory = engine.memory_stats()
    if "peak_bytes_in_use" in memory:
        row["device peak MiB"] = memory["peak_bytes_in_use"] / 2**20
        row["device headroom MiB"] = (memory["bytes_limit"] - memory["peak_bytes_in_use"]) / 2**20
    return row


def build_layouts(args: argparse.Namespace, checkpoint: Checkpoint, config: EngineConfig) -> list[KVLayout]:
    """The pools to compare: of so many bytes, of such fractions of the device's memory, or what memory allows."""
    model = functional(checkpoint.config)
    layout: KVLayout = model.kv_layout(num_pages=2, page_size=args.page_size, dtype=DTYPES[args.dtype])
    if args.memory_bytes:
        return [replace(layout, num_pages=max(2, size // layout.bytes_per_page)) for size in args.memory_bytes]
    return [
        size_pool(model, checkpoint.params, layout, replace(config, memory_utilization=fraction))
        for fraction in args.memory_utilization
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      UsageError: an argument is unknown or cannot be read.
    """
    parser = Parser(description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="the trace to replay")
    source.add_argument("--make", choices=TRACES, default="rag", help="make a trace of this kind (rag)")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="write the made trace here")
    parser.add_argument("--requests", type=int, default=16, help="requests of a made trace (16)")
    parser.add_argument("--shared", type=int, default=340, help="tokens of its shared or longest part (340)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate for each of its requests (32)")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second (4)")
    parser.add_argument("--seed", type=int, default=0, help="of its random tokens and arrivals (0)")
    parser.add_argument("--time", choices=("virtual", "real"), default="virtual", help="skip waits, or sleep (virtual)")
    parser.add_argument("--caching", choices=("on", "off"), nargs="+", default=["on"], help="prefix caching (on)")
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument("--memory-bytes", type=int, nargs="+", metavar="BYTES", help="pools of these sizes")
    pool.add_argument("--memory-utilization", type=float, nargs="+", default=[0.9], metavar="FRACTION",
                      help="pools that fill the device so far (0.9); a CPU has no limit: --memory-bytes")  # fmt: skip
    parser.add_argument("--model", default=registry.DEFAULT_MODEL, help="as for generate.py")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and pages (float32)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
    parser.add_argument("--max-seqs", type=int, default=16, help="sequences at once (16)")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longest prompt and answer (2048)")
    parser.add_argument("--max-tokens-per-step", type=int, default=256, help="tokens a step computes (256)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """The whole command; raises UsageError, ValueError or OSError on bad input."""
    check_outputs(args.save, args.json)
    given = None if args.trace is None else read_trace(args.trace)
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    trace = given or make_trace(args.make, args, checkpoint.config.vocab_size)
    if args.save is not None:
        args.save.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace), encoding="utf-8")
    config = EngineConfig(
        max_seqs=args.max_seqs,
        max_model_len=min(args.max_model_len, checkpoint.config.max_model_len),
        max_tokens_per_step=args.max_tokens_per_step,
        sliding_window=checkpoint.config.widest_window,
    )
    rows = []
    for layout in build_layouts(args, checkpoint, config):
        for caching in args.caching:
            chosen = replace(config, prefix_caching=caching == "on")
            engine = Engine(functional(checkpoint.config), checkpoint.params, layout, checkpoint.tokenizer, chosen)
            engine.warm_up()
            clock = Clock(real=args.time == "real")
            started = time.perf_counter()
            served = replay(engine, trace, clock, checkpoint.tokenizer.encode)
            rows.append(summarise(engine, trace, served, time.perf_counter() - started))
    print(format_rows(rows))
    if args.json is not None:
        write_json(args.json, "serve_trace", args, rows=rows)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """A column for each run."""
    width = max(len(name) for name in rows[0])
    lines = []
    for name in rows[0]:
        cells = [f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for row in rows]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
