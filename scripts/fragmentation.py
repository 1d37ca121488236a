"""Shows where a KV cache's memory goes: contiguous blocks beside pages, on the same queue of requests.

Three contiguous caches take blocks from a buddy allocator: "max" reserves the longest context for every request,
"powers of two" its prompt and the next power of two above its answer, "oracle" what it will need exactly. "paged" is
this package's page pool and block tables. Every slot of the cache holds a token, or is wasted in one of three ways:
reserved for a later token of the same request, internal (the request ends before it gets there; the rest of a page),
or external (free or rounded off, but of no use where it lies). What is left because the next request needs more than
all of it is free.

The lengths are made, ShareGPT-like and Alpaca-like, or your own (--lengths). No model runs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts import sharing, waste
from scripts.command_line import Parser, check_outputs, exit_status, format_table, write_json
from scripts.lengths import ALPACA, SHAREGPT, Lengths, Load, read_lengths

KINDS = ("tokens", "reserved", "internal", "external", "free")
PUBLISHED = {"max": 20.4, "powers of two": 26.8, "oracle": 38.2, "paged": 96.3}
"""Per cent of the slots that hold tokens, ShareGPT, OPT-13B on a 40 GB card: Kwon et al. 2023, figure 2."""

PUBLISHED_SHARING = {
    ("ShareGPT-like", "samples"): "16.2 to 30.5",
    ("ShareGPT-like", "beams"): "44.3 to 66.3",
    ("Alpaca-like", "samples"): "6.1 to 9.8",
    ("Alpaca-like", "beams"): "37.6 to 55.2",
}
"""Per cent of the blocks saved with 2, 4 and 6 samples or beams: Kwon et al. 2023, section 6.3."""

WIDTHS = (2, 4, 6)
SHARED_PREFIX = 340
SHARING_REQUESTS = 16


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      UsageError: an argument is unknown or cannot be read.
    """
    parser = Parser(description=__doc__)
    parser.add_argument("--lengths", type=Path, metavar="FILE.jsonl", help='your own requests instead, a line each: '
                        '{"prompt_tokens": 161, "output_tokens": 338}')  # fmt: skip
    parser.add_argument("--requests", type=int, default=1000, help="requests of a made load (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of made lengths and of the beams' choices (0)")
    parser.add_argument("--num-slots", type=int, default=15_728, help="tokens that the cache has room for (15728: "
                        "12 GiB at 800 KiB a token, OPT-13B on a 40 GB card)")  # fmt: skip
    parser.add_argument("--max-len", type=int, default=2048, help="longest context (2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")
    parser.add_argument("--max-seqs", type=int, default=256, help="sequences at once, when paged (256)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the shares (extra: plots)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(argv)


def waste_rows(name: str, requests: Sequence[Lengths], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Where the slots of each cache are, in per cent."""
    asked = {
        "max": lambda request: args.max_len,
        "powers of two": lambda request: min(args.max_len, request.prompt + (1 << (request.output - 1).bit_length())),
        "oracle": lambda request: request.total,
    }
    results = {cache: waste.contiguous(requests, ask, num_slots=args.num_slots) for cache, ask in asked.items()}
    results["paged"] = waste.paged(
        requests,
        num_slots=args.num_slots,
        page_size=args.page_size,
        max_len=args.max_len,
        max_seqs=args.max_seqs,
    )
    rows = []
    for cache, result in results.items():
        values = asdict(result)
        row: dict[str, Any] = {"load": name, "cache": cache} | {f"{kind} %": 100 * values[kind] for kind in KINDS}
        published = PUBLISHED[cache] if name == SHAREGPT.name else ""
        rows.append(
            row | {"published tokens %": published} | {key: values[key] for key in ("sequences", "preemptions")}
        )
    return rows


def sharing_rows(name: str, requests: Sequence[Lengths], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Per cent of the pages that sharing saves."""
    some = requests[:SHARING_REQUESTS]
    shared = sharing.Sharing(some, page_size=args.page_size, max_width=max(WIDTHS), max_prefix=SHARED_PREFIX)
    saved = [
        (f"{n} {kind}", shared.samples(n, beams=kind == "beams", seed=args.seed), kind)
        for kind in ("samples", "beams")
        for n in WIDTHS
    ]
    saved.append((f"a prefix of {SHARED_PREFIX}", shared.prefix(SHARED_PREFIX), "prefix"))
    return [
        {
            "load": name,
            "shared by": who,
            "pages saved %": 100 * share,
            "published %": PUBLISHED_SHARING.get((name, kind), ""),
        }
        for who, share, kind in saved
    ]


def remark(row: dict[str, Any], page_size: int) -> str:
    """What the last pages cost, for the paged row of a load."""
    taken = row["tokens %"] + row["internal %"]
    return (
        f"{row['load']}, pages of {page_size}: {100 * row['internal %'] / taken:.1f} % of the slots in live pages hold "
        "no token; the shorter the sequences, the more, since each wastes half a page on average"
    )


def describe(load: Load, requests: Sequence[Lengths]) -> str:
    """The lengths of a made load."""
    mean = [sum(lengths) / len(requests) for lengths in zip(*requests, strict=True)]
    return (
        f"{load.name}: {len(requests)} requests, log-normal; prompts {mean[0]:.0f} tokens on average (deviation "
        f"{load.prompt_deviation:.0f}), outputs {mean[1]:.0f} (deviation {load.output_deviation:.0f})"
    )


def plot(path: Path, wasted: Sequence[dict[str, Any]], shared: Sequence[dict[str, Any]]) -> None:
    """Draws the shares of every load, and below them what sharing saves."""
    from matplotlib.figure import Figure

    colours = dict(zip(KINDS, ("#4477aa", "#88ccee", "#ddaa33", "#bb5566", "#dddddd"), strict=True))
    loads = list(dict.fromkeys(row["load"] for row in wasted))
    figure = Figure(figsize=(5.5 * len(loads) + 1, 6.5), layout="constrained")
    axes = figure.subplots(2, len(loads), sharex=True, squeeze=False)
    for column, load in enumerate(loads):
        above, below = axes[:, column]
        rows = [row for row in wasted if row["load"] == load][::-1]
        caches, left = [row["cache"] for row in rows], [0.0] * len(rows)
        for kind in KINDS:
            widths = [row[f"{kind} %"] for row in rows]
            above.barh(caches, widths, left=left, color=colours[kind], label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        if rows[0]["published tokens %"]:
            published = [row["published tokens %"] for row in rows]
            above.plot(published, caches, "kD", markersize=5, label="tokens, as published")
        above.set_title(load)
        above.set_xlabel("slots of the cache, %")
        above.tick_params(labelbottom=True)
        rows = [row for row in shared if row["load"] == load][::-1]
        below.barh([row["shared by"] for row in rows], [row["pages saved %"] for row in rows], color="#228833")
        below.set_xlabel("pages saved by sharing, %")
        below.set_xlim(0, 100)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> None:
    """The whole command; raises UsageError, ValueError or OSError on bad input."""
    for name in ("requests", "num_slots", "max_len", "page_size", "max_seqs"):
        least = 2 if name == "max_len" else 1
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    check_outputs(args.json, plot=args.plot)
    if args.lengths is not None:
        loads = {args.lengths.name: read_lengths(args.lengths, max_len=args.max_len)}
    else:
        loads = {}
        for load in (SHAREGPT, ALPACA):
            loads[load.name] = load.draw(args.requests, max_len=args.max_len, seed=args.seed)
            print(describe(load, loads[load.name]))
    wasted = [row for name, requests in loads.items() for row in waste_rows(name, requests, args)]
    shared = [row for name, requests in loads.items() for row in sharing_rows(name, requests, args)]
    print(f"\nSlots of a cache for {args.num_slots} tokens, averages while requests wait:\n\n{format_table(wasted)}\n")
    print("\n".join(remark(row, args.page_size) for row in wasted if row["cache"] == "paged"))
    print(
        f"\nPages saved by up to {SHARING_REQUESTS} requests side by side; beams: in each step {sharing.REPLACED:.0%} "
        f"of them give way to copies of others (assumed)\n\n{format_table(shared)}"
    )
    if args.json is not None:
        write_json(args.json, "fragmentation", args, waste=wasted, sharing=shared)
    if args.plot is not None:
        plot(args.plot, wasted, shared)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
