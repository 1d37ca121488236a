"""Measures the paged cache on this machine.

throughput   the engine's tokens per second for several numbers of sequences and dtypes
decode       a decode step while the context, the table's width or the pool's size grows
prefill      a step that computes a chunk of a prompt
contiguous   a decode step over pages beside the same model over a plain contiguous cache
memory       a load served out of the same bytes, in pages and contiguous: sequences at once, tokens per second
page-size    tokens per second and waste for several sizes of the page
overhead     what the engine's host side adds to a step: scheduling, hashing, tables, dispatch
floor        what the machine's memory and arithmetic allow, for the loads of compare_torch.py
parts        a step of the engine beside the sum of its parts, each measured alone
compile      programs compiled ahead, the time that takes, and what is compiled later
perplexity   of a text, for several dtypes of the pages

Rounds are interleaved and medians reported: machines drift. Compilation is left out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models import registry
from scripts.benchmarks.floor import floor
from scripts.benchmarks.memory import memory
from scripts.benchmarks.perplexity import TEXT, perplexity
from scripts.benchmarks.serving import compilations, overhead, page_size, parts, throughput
from scripts.benchmarks.steps import contiguous, decode, plot_decode, prefill
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

COMMANDS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "throughput": throughput,
    "decode": decode,
    "prefill": prefill,
    "contiguous": contiguous,
    "memory": memory,
    "page-size": page_size,
    "floor": floor,
    "overhead": overhead,
    "parts": parts,
    "compile": compilations,
    "perplexity": perplexity,
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      UsageError: an argument is unknown or cannot be read.
    """
    parser = Parser(description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    commands = {name: subparsers.add_parser(name, description=function.__doc__) for name, function in COMMANDS.items()}

    def numbers(names: str, option: str, default: list[int], text: str) -> None:
        shown = " ".join(map(str, default))
        for name in names.split():
            commands[name].add_argument(option, type=int, nargs="+", default=default, help=f"{text} ({shown})")

    def number(names: str, option: str, default: int, text: str) -> None:
        for name in names.split():
            commands[name].add_argument(option, type=int, default=default, help=f"{text} ({default})")

    numbers("throughput contiguous", "--sequences", [1, 8, 16, 32], "sequences at once")
    numbers("overhead", "--sequences", [1, 32, 256], "sequences at once")
    numbers("parts", "--sequences", [256], "sequences at once")
    numbers("compile", "--sequences", [8, 32], "sequences at once")
    number("decode", "--sequences", 8, "sequences of the step")
    number("throughput parts", "--new-tokens", 64, "tokens to generate a sequence")
    numbers("decode", "--contexts", [64, 128, 256, 512, 1024], "tokens a sequence")
    numbers("contiguous", "--contexts", [64, 512], "tokens cached")
    number("contiguous", "--max-model-len", 2048, "tokens that the contiguous cache reserves a sequence")
    numbers("prefill", "--chunks", [16, 64, 256, 512], "tokens of the step")
    numbers("prefill", "--cached", [0, 512], "tokens cached before")
    number("memory", "--budget-mib", 96, "mebibytes for keys and values")
    number("memory", "--requests", 32, "requests of the load")
    number("page-size", "--requests", 16, "requests of the load")
    number("memory page-size", "--shrink", 4, "divides the ShareGPT-like lengths, and the longest context of 2048")
    number("memory page-size", "--seed", 0, "of the lengths and tokens")
    number("memory", "--max-seqs", 64, "sequences at once, when paged")
    number("page-size", "--max-seqs", 16, "sequences at once")
    numbers("page-size", "--sizes", [8, 16, 32, 64, 128, 256], "tokens a page")
    number("overhead", "--steps", 300, "steps to measure")
    number("throughput decode prefill contiguous page-size parts", "--rounds", 5, "interleaved rounds")
    number("memory", "--rounds", 3, "interleaved rounds")
    number("throughput decode prefill contiguous memory overhead parts perplexity", "--page-size", 16, "tokens a page")

    for name in ("throughput", "contiguous", "floor", "perplexity"):
        commands[name].add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="of the weights "
                                    "and pages (all)")  # fmt: skip
    for name in ("decode", "prefill", "memory", "page-size", "parts", "compile"):
        commands[name].add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and pages (float32)")
    for name, command in commands.items():
        if name != "overhead":
            command.add_argument("--model", default=registry.DEFAULT_MODEL, help="as for generate.py")
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    commands["throughput"].add_argument("--kv-dtype", choices=KV_DTYPES, help="of the pages; by default that of the "
                                        "weights")  # fmt: skip
    commands["decode"].add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times (extra: plots)")
    text = commands["perplexity"]
    text.add_argument("--text", type=Path, default=TEXT, metavar="FILE", help="UTF-8 (tests/data/perplexity.txt)")
    text.add_argument("--kv-dtypes", choices=KV_DTYPES, nargs="+", default=list(KV_DTYPES), help="of the pages (all); "
                      "changes are relative to the first")  # fmt: skip
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if name != "seed" and any(x < (name != "cached") for x in _numbers(value)):
            raise ValueError(f"--{name.replace('_', '-')} must be at least {int(name != 'cached')}, got {value}")
    return args


def run(args: argparse.Namespace) -> None:
    """Runs one measurement and prints its table."""
    picture = getattr(args, "plot", None)
    check_outputs(args.json, plot=picture)
    rows = COMMANDS[args.command](args)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(format_table(rows))
    if args.json is not None:
        write_json(args.json, f"benchmark {args.command}", args, rows=rows)
    if picture is not None:
        plot_decode(picture, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


def _numbers(value: Any) -> list[int]:
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)]


if __name__ == "__main__":
    sys.exit(main())
