"""Generates text for one or many prompts out of one paged KV cache.

Without arguments: completes a few prompts in one batch with SmolLM2-135M, as a stream, and shows what the pages did.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from tqdm import tqdm

import pallas_kernels
from models import registry
from models.registry import Checkpoint
from models.transformer import functional
from paged_jax import (
    Completion,
    Engine,
    EngineConfig,
    KVLayout,
    Request,
    SamplingParams,
    TokenEvent,
    size_pool,
)
from scripts.command_line import DTYPES, KV_DTYPES, Parser, UsageError, check_outputs, exit_status, read_jsonl
from scripts.page_plot import PageHistory

DEMO_PROMPTS = (
    "The three primary colours are",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at a lower temperature on a mountain because",
)
MAX_DEFAULT_SEQS = 32


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      UsageError: an argument is unknown or cannot be read.
    """
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--model",
        default=registry.DEFAULT_MODEL,
        help=f"{registry.DEFAULT_MODEL} (the default), a GGUF file, a Hugging Face folder or owner/name on its hub",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="text to continue; may be given more than once")
    source.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='a prompt a line: {"prompt": "..."}')
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each prompt (64)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens (all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the fewest most likely "
                        "tokens that together have probability P (1)")  # fmt: skip
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="sample among the tokens at least P "
                        "times as likely as the likeliest (0)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (0)")
    parser.add_argument("--n", type=int, default=1, help="samples for each prompt (1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; "
                        "may be given more than once")  # fmt: skip
    parser.add_argument("--logprobs", action="store_true", help="write the log probability of each token to --output")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
    parser.add_argument("--num-pages", type=int, help="pages of the pool, one of them the null page; by default "
                        "what the memory allows")  # fmt: skip
    parser.add_argument("--memory-utilization", type=float, default=0.9, help="fraction of the device's memory (0.9)")
    parser.add_argument("--max-seqs", type=int, help=f"sequences at once; by default one a prompt, at most "
                        f"{MAX_DEFAULT_SEQS}")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and pages (float32)")
    parser.add_argument("--implementation", help="of the attention: " + ", ".join(pallas_kernels.IMPLEMENTATIONS))
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the pages; by default that of the weights")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write the answers here, a line each")
    parser.add_argument("--stats", action="store_true", help="also show prefix hits, preemptions and what is cached")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the pages over time (extra: plots)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table: only what was asked for")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of the file, or of the demonstration."""
    if args.prompt:
        return [check_prompt(prompt, "--prompt") for prompt in args.prompt]
    if args.prompts is None:
        return list(DEMO_PROMPTS)
    prompts = []
    for where, record in read_jsonl(args.prompts):
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UsageError(f'{where}: must be {{"prompt": "..."}}, got {json.dumps(record)[:80]}')
        prompts.append(check_prompt(record["prompt"], where))
    if not prompts:
        raise UsageError(f'{args.prompts} holds no prompt; a line is {{"prompt": "..."}}')
    return prompts


def check_prompt(prompt: str, where: str) -> str:
    """The prompt, if it can be text for a model; `where` begins the message if not."""
    if not prompt:
        raise UsageError(f"{where}: the prompt is empty; give at least one character")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: the prompt is not valid Unicode text ({error})") from error
    return prompt


def make_requests(args: argparse.Namespace, texts: Sequence[str]) -> list[Request]:
    """What the command line asks for; raises ValueError if a value is out of range."""
    params = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, seed=args.seed)
    return [
        Request(
            text,
            max_tokens=args.max_tokens,
            ignore_eos=args.ignore_eos,
            sampling=params,
            n=args.n,
            stop=args.stop,
            logprobs=0 if args.logprobs else None,
        )
        for text in texts
    ]


def engine_config(args: argparse.Namespace, num_prompts: int) -> EngineConfig:
    """The engine's limits, but for the model's context; raises ValueError if a value is out of range."""
    return EngineConfig(
        max_seqs=args.max_seqs if args.max_seqs is not None else min(num_prompts * args.n, MAX_DEFAULT_SEQS),
        max_tokens_per_step=max(512, args.max_seqs or 0),
        memory_utilization=args.memory_utilization,
        implementation=args.implementation,
    )


def build_engine(args: argparse.Namespace, checkpoint: Checkpoint, num_prompts: int) -> Engine:
    """An engine whose pool has the pages asked for, or as many as the memory allows."""
    config = replace(
        engine_config(args, num_prompts),
        max_model_len=checkpoint.config.max_model_len,
        sliding_window=checkpoint.config.widest_window,
    )
    model = functional(checkpoint.config)
    num_pages = 2 if args.num_pages is None else args.num_pages
    kv_dtype = KV_DTYPES[args.kv_dtype or args.dtype]
    layout: KVLayout = model.kv_layout(num_pages=num_pages, page_size=args.page_size, dtype=kv_dtype)
    if args.num_pages is None:
        layout = size_pool(model, checkpoint.params, layout, config)
    return Engine(model, checkpoint.params, layout, checkpoint.tokenizer, config)


class Display:
    """Shows the answers in the order of the prompts and their n samples while all of them grow: the first unfinished
    one as it comes, each later one from where it has got to once its turn comes."""

    def __init__(self, prompts: list[str], n: int = 1) -> None:
        self._n = n
        self._titles = [
            f"[{number}] {prompt}" if n == 1 else f"[{number}.{sample}] {prompt}"
            for number, prompt in enumerate(prompts, start=1)
            for sample in range(1, n + 1)
        ]
        self._pending = [""] * len(self._titles)
        self._finished = [False] * len(self._titles)
        self._shown = -1

    def __call__(self, index: int, event: TokenEvent) -> None:
        """Takes one token."""
        place = index * self._n + event.sample
        self._pending[place] += event.text
        self._finished[place] = event.finish_reason is not None
        if self._shown < 0:
            self._next()
        while self._shown < len(self._titles):
            print(self._pending[self._shown], end="", flush=True)
            self._pending[self._shown] = ""
            if not self._finished[self._shown]:
                return
            print()
            self._next()

    def close(self) -> None:
        """Ends a line that was left open."""
        if 0 <= self._shown < len(self._titles):
            print(flush=True)

    def _next(self) -> None:
        self._shown += 1
        if self._shown < len(self._titles):
            print(f"\n{self._titles[self._shown]}", end="")


class Progress:
    """A bar that counts tokens; an answer that ends early counts as whole. Shown on a terminal only."""

    def __init__(self, num_prompts: int, n: int, max_tokens: int) -> None:
        self._n = n
        self._left = [max_tokens] * (num_prompts * n)
        self._bar = tqdm(total=len(self._left) * max_tokens, unit="tok", desc="generating", disable=None)

    def __call__(self, index: int, event: TokenEvent) -> None:
        """Takes one token."""
        place = index * self._n + event.sample
        count = 1 if event.finish_reason is None else self._left[place]
        self._left[place] -= count
        self._bar.update(count)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def table(engine: Engine, seconds: float) -> str:
    """What the run did, as a short table."""
    stats, layout, config = engine.stats, engine.layout, engine.config
    mebi = 1 << 20
    reserved = stats.peak_seqs * config.max_model_len * layout.bytes_per_token
    used = stats.peak_pages * layout.bytes_per_page
    rows = [
        ("prefill", f"{stats.prefill_tokens} tokens, {_rate(stats.prefill_tokens, stats.prefill_seconds)}"),
        ("decode", f"{stats.decode_tokens} tokens, {_rate(stats.decode_tokens, stats.decode_seconds)}"),
        ("pages live at the peak", f"{stats.peak_pages} of {layout.num_pages - 1} ({layout.page_size} tokens each), "
         f"{used / mebi:.1f} MiB"),
        ("internal waste", f"{100 * stats.internal_waste:.1f} % of the slots in live pages, averaged over the steps"),
        ("a contiguous cache", f"would reserve {reserved / mebi:.1f} MiB ({stats.peak_seqs} x {config.max_model_len} "
         f"tokens): {reserved / max(used, 1):.0f} times as much"),
        ("compilations", f"{stats.num_compilations}, {stats.compile_seconds:.1f} s"),
        ("attention", engine.implementation),
        ("total", f"{seconds:.1f} s with compilation"),
    ]  # fmt: skip
    return _aligned(rows)


def stats_table(engine: Engine) -> str:
    """What the memory manager did, as a short table."""
    metrics = engine.metrics()
    prefix = metrics.prefix
    rows = [
        ("prefix hits", f"{prefix.hit} of {prefix.queried} prompt tokens ({100 * prefix.hit_rate:.1f} %)"),
        ("after preemption", f"{prefix.rehit} of {prefix.requeried} tokens found again"),
        ("preemptions", str(metrics.num_preemptions)),
        ("evictions", f"{metrics.num_evictions} cached pages"),
        ("pages now", f"{metrics.pages_live} live, {metrics.pages_cached} cached, {metrics.pages_free} free"),
        ("largest batch", f"{engine.stats.peak_seqs} sequences"),
    ]
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if seconds else "no time"


def records(prompts: Sequence[str], n: int, answers: Sequence[Completion]) -> Iterator[str]:
    """One JSON object a line, in the order of the prompts and their n samples."""
    for place, answer in enumerate(answers):
        record = {
            "index": place // n,
            "prompt": prompts[place // n],
            "text": answer.text,
            "token_ids": answer.token_ids,
            "prompt_tokens": len(answer.prompt_token_ids),
            "finish_reason": answer.finish_reason,
        }
        if n > 1:
            record["sample"] = answer.sample
        if answer.logprobs is not None:
            record["logprobs"] = answer.logprobs
        yield json.dumps(record, ensure_ascii=False) + "\n"


def run(args: argparse.Namespace) -> None:
    """The whole command; raises UsageError, ValueError or OSError on bad input."""
    given = read_prompts(args)
    # Whatever can be refused is refused before the model loads.
    make_requests(args, given)
    engine_config(args, len(given))
    num_pages = 2 if args.num_pages is None else args.num_pages
    KVLayout(num_layers=1, num_pages=num_pages, page_size=args.page_size, num_kv_heads=1, head_dim=1)
    if args.logprobs and args.output is None:
        raise UsageError("--logprobs are written to a file: give --output too")
    check_outputs(args.output, plot=args.plot)
    if not args.quiet:
        print(f"loading {args.model} ({args.dtype}) on {jax.default_backend()}", file=sys.stderr)
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    texts = given
    if args.chat:
        texts = [checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in given]
    engine = build_engine(args, checkpoint, len(given))
    requests = make_requests(args, texts)

    display: Display | Progress | None = None
    if args.output is None:
        display = Display(given, args.n)
    elif not args.quiet:
        display = Progress(len(given), args.n, args.max_tokens)
    started = time.perf_counter()
    try:
        history = None if args.plot is None else PageHistory(engine)
        answers = engine.generate(requests, on_token=display, on_step=None if history is None else history.record)
    finally:
        if display is not None:
            display.close()
    if args.output is not None:
        args.output.write_text("".join(records(given, args.n, answers)), encoding="utf-8")
    if not args.quiet:
        print("\n" + table(engine, time.perf_counter() - started))
    if args.stats:
        print("\n" + stats_table(engine))
    if history is not None:
        history.plot(args.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
