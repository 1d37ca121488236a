"""Generates text for one or many prompts out of one paged KV cache.

Without arguments: completes a few prompts in one batch with SmolLM2-135M, as a stream, and shows what the pages did.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
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
    TokenEvent,
    size_pool,
)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DEMO_PROMPTS = (
    "The three primary colours are",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at a lower temperature on a mountain because",
)
MAX_DEFAULT_SEQS = 32


class UsageError(Exception):
    """Bad input: one line for the user."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the only one for now: greedy")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
    parser.add_argument("--num-pages", type=int, help="pages of the pool, one of them the null page; by default "
                        "what the memory allows")  # fmt: skip
    parser.add_argument("--memory-utilization", type=float, default=0.9, help="fraction of the device's memory (0.9)")
    parser.add_argument("--max-seqs", type=int, help=f"sequences at once; by default one a prompt, at most "
                        f"{MAX_DEFAULT_SEQS}")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and pages (float32)")
    parser.add_argument("--implementation", choices=list(pallas_kernels.IMPLEMENTATIONS), help="of the attention")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write the answers here, a line each")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table: only what was asked for")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of the file, or of the demonstration."""
    if args.prompt:
        return list(args.prompt)
    if args.prompts is None:
        return list(DEMO_PROMPTS)
    prompts = []
    try:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {args.prompts}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{args.prompts}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UsageError(f'{args.prompts}, line {number}: must be {{"prompt": "..."}}, got {line.strip()[:80]}')
        prompts.append(record["prompt"])
    if not prompts:
        raise UsageError(f'{args.prompts} holds no prompt; a line is {{"prompt": "..."}}')
    return prompts


def build_engine(args: argparse.Namespace, checkpoint: Checkpoint, num_prompts: int) -> Engine:
    """An engine whose pool has the pages asked for, or as many as the memory allows."""
    config = EngineConfig(
        max_seqs=args.max_seqs if args.max_seqs is not None else min(num_prompts, MAX_DEFAULT_SEQS),
        max_model_len=checkpoint.config.max_model_len,
        memory_utilization=args.memory_utilization,
        implementation=args.implementation,
    )
    model = functional(checkpoint.config)
    num_pages = 2 if args.num_pages is None else args.num_pages
    layout: KVLayout = model.kv_layout(num_pages=num_pages, page_size=args.page_size, dtype=DTYPES[args.dtype])
    if args.num_pages is None:
        layout = size_pool(model, checkpoint.params, layout, config)
    return Engine(model, checkpoint.params, layout, checkpoint.tokenizer, config)


class Display:
    """Shows the answers in the order of the prompts while all of them grow: the first unfinished one as it comes, each
    later one from where it has got to once its turn comes."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._pending = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._shown = -1

    def __call__(self, index: int, event: TokenEvent) -> None:
        """Takes one token."""
        self._pending[index] += event.text
        self._finished[index] = event.finish_reason is not None
        if self._shown < 0:
            self._next()
        while self._shown < len(self._prompts):
            print(self._pending[self._shown], end="", flush=True)
            self._pending[self._shown] = ""
            if not self._finished[self._shown]:
                return
            print()
            self._next()

    def close(self) -> None:
        """Ends a line that was left open."""
        if 0 <= self._shown < len(self._prompts):
            print(flush=True)

    def _next(self) -> None:
        self._shown += 1
        if self._shown < len(self._prompts):
            print(f"\n[{self._shown + 1}] {self._prompts[self._shown]}", end="")


class Progress:
    """A bar that counts tokens; an answer that ends early counts as whole. Shown on a terminal only."""

    def __init__(self, num_prompts: int, max_tokens: int) -> None:
        self._left = [max_tokens] * num_prompts
        self._bar = tqdm(total=num_prompts * max_tokens, unit="tok", desc="generating", disable=None)

    def __call__(self, index: int, event: TokenEvent) -> None:
        """Takes one token."""
        count = 1 if event.finish_reason is None else self._left[index]
        self._left[index] -= count
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
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if seconds else "no time"


def records(prompts: Sequence[str], answers: Sequence[Completion]) -> Iterator[str]:
    """One JSON object a line, in the order of the prompts."""
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        record = {
            "index": index,
            "prompt": prompt,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "prompt_tokens": len(answer.prompt_token_ids),
            "finish_reason": answer.finish_reason,
        }
        yield json.dumps(record, ensure_ascii=False) + "\n"


def run(args: argparse.Namespace) -> None:
    """The whole command; raises UsageError, ValueError or OSError on bad input."""
    if args.temperature != 0:
        raise UsageError(f"--temperature accepts only 0 (greedy) for now, got {args.temperature:g}")
    given = read_prompts(args)
    if args.output is not None:
        args.output.open("a").close()  # find out now whether it can be written
    if not args.quiet:
        print(f"loading {args.model} ({args.dtype}) on {jax.default_backend()}", file=sys.stderr)
    checkpoint = registry.load(args.model, dtype=DTYPES[args.dtype])
    texts = given
    if args.chat:
        texts = [checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in given]
    engine = build_engine(args, checkpoint, len(given))
    requests = [Request(text, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos) for text in texts]

    display: Display | Progress | None = None
    if args.output is None:
        display = Display(given)
    elif not args.quiet:
        display = Progress(len(given), args.max_tokens)
    started = time.perf_counter()
    try:
        answers = engine.generate(requests, on_token=display)
    finally:
        if display is not None:
            display.close()
    if args.output is not None:
        args.output.write_text("".join(records(given, answers)), encoding="utf-8")
    if not args.quiet:
        print("\n" + table(engine, time.perf_counter() - started))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for bad input, 130 when interrupted."""
    try:
        run(parse_arguments(argv))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (UsageError, ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
