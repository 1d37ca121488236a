"""Traces of requests: read from a file, or made."""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paged_jax.layout import ceil_div
from scripts.command_line import UsageError, read_jsonl


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
      arrival: seconds since the start, or after the answer that it follows.
      prompt: text; or
      token_ids: tokens.
      max_tokens: tokens to generate.
      n: samples.
      cache_salt: as of `paged_jax.Request`.
      follows: the request whose prompt and answer it continues, by its place in the trace.
    """

    arrival: float
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int = 32
    n: int = 1
    cache_salt: str | None = None
    follows: int | None = None


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file.

    Raises:
      UsageError: it cannot be read, or a line is not a request.
    """
    trace: list[TraceRequest] = []
    for where, value in read_jsonl(path):
        try:
            request = TraceRequest(**value)
        except TypeError as error:
            raise UsageError(f"{where}: not a request ({error})") from error
        if (request.prompt is None) == (request.token_ids is None):
            raise UsageError(f"{where}: give either prompt or token_ids")
        if request.follows is not None and not 0 <= request.follows < len(trace):
            raise UsageError(f"{where}: follows must name an earlier line, got {request.follows}")
        trace.append(request)
    if not trace:
        raise UsageError(f"{path} holds no request")
    return trace


def make_trace(kind: str, args: argparse.Namespace, vocab_size: int) -> list[TraceRequest]:
    """A trace of one of `TRACES`, the same for the same seed."""
    rng = random.Random(args.seed)

    def tokens(low: int, high: int | None = None) -> list[int]:
        return [rng.randrange(vocab_size // 2, vocab_size) for _ in range(rng.randint(low, high or low))]

    gaps = itertools.accumulate(rng.expovariate(args.rate) for _ in itertools.count())
    return TRACES[kind](args, tokens, gaps)


def _rag(args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]) -> list[TraceRequest]:
    """One long system prompt, a short question each."""
    shared = tokens(args.shared)
    return [_request(args, next(arrivals), shared + tokens(8, 40)) for _ in range(args.requests)]


def _rag_volatile_first(
    args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]
) -> list[TraceRequest]:
    """As rag, with a token that differs each time (a date, a user's name) before the shared part."""
    return [
        replace(request, token_ids=[i, *(request.token_ids or [])])
        for i, request in enumerate(_rag(args, tokens, arrivals))
    ]


def _rag_volatile_last(
    args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]
) -> list[TraceRequest]:
    """As rag, with the token that differs behind everything else."""
    return [
        replace(request, token_ids=[*(request.token_ids or []), i])
        for i, request in enumerate(_rag(args, tokens, arrivals))
    ]


def _chat(args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]) -> list[TraceRequest]:
    """Conversations of four turns under one system prompt; each turn follows the answer before it."""
    shared, turns = tokens(args.shared), 4
    trace: list[TraceRequest] = []
    while len(trace) < args.requests:
        trace.append(_request(args, next(arrivals), shared + tokens(10, 40)))
        for _ in range(min(turns, args.requests - len(trace) + 1) - 1):
            trace.append(replace(_request(args, 0.5, tokens(10, 40)), follows=len(trace) - 1))
    return trace


def _agent(args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]) -> list[TraceRequest]:
    """Two agents whose transcripts grow by an answer and a tool's long output each step."""
    starts = [_request(args, next(arrivals), tokens(args.shared)) for _ in range(2)]
    steps = [replace(_request(args, 0.1, tokens(20, 60)), follows=i) for i in range(args.requests - 2)]
    return starts + steps


def _one_shot(
    args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]
) -> list[TraceRequest]:
    """Prompts of every length that have nothing in common."""
    return [_request(args, next(arrivals), tokens(4, args.shared)) for _ in range(args.requests)]


def _bursty(
    args: argparse.Namespace, tokens: Callable[..., list[int]], arrivals: Iterator[float]
) -> list[TraceRequest]:
    """As one-shot, eight at a time."""
    bursts = [burst for burst in itertools.islice(arrivals, ceil_div(args.requests, 8)) for _ in range(8)]
    return [_request(args, 8 * burst, tokens(4, args.shared)) for burst in bursts[: args.requests]]


TRACES = {
    "rag": _rag,
    "rag-volatile-first": _rag_volatile_first,
    "rag-volatile-last": _rag_volatile_last,
    "chat": _chat,
    "agent": _agent,
    "one-shot": _one_shot,
    "bursty": _bursty,
}


def _request(args: argparse.Namespace, arrival: float, token_ids: list[int]) -> TraceRequest:
    return TraceRequest(arrival=round(arrival, 4), token_ids=token_ids, max_tokens=args.max_tokens)
