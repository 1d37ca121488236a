"""Compares this package's engine with PyTorch: transformers and vllm, on the same weights, prompts and threads.

Each system runs in a process of its own, the baselines under the Python that --torch-python names (an environment with
torch and transformers, and vllm if it is to be compared: see scripts/compare/torch_worker.py). All load the model once
and then take turns, so that a slow phase of the machine hits all of them. A system that does not start or fails is
named, with its error, and the others go on. The same command compares on a GPU.

loads: plain-N (N requests of 64 tokens from prompts of about 5), shared-16 (16 of 32 tokens whose prompts share some
340), mixed-64 (64 of 4 to 400 tokens).
systems: dense, static, static-compiled, continuous (transformers), vllm; this package is always there.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.tokenizer import Tokenizer
from scripts.command_line import DTYPES, Parser, UsageError, check_outputs, exit_status, format_table, write_json
from scripts.compare import outputs, report
from scripts.compare.loads import LOADS, Requests, longest
from scripts.compare.process import System, Worker, WorkerError, start
from scripts.compare.report import OURS, Result

BASELINES = ("dense", "static", "static-compiled", "continuous", "vllm")

Answers = dict[tuple[str, System], list[list[int]]]
"""Tokens of every request, by load and system."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      UsageError: an argument is unknown or cannot be read.
    """
    parser = Parser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--torch-python", required=True, metavar="PATH", help="the Python that runs the baselines")
    parser.add_argument("--vllm-python", metavar="PATH", help="another one for vllm")
    parser.add_argument("--systems", nargs="*", choices=BASELINES, default=list(BASELINES), help="the baselines (all)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="what they serve (all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of weights and cache (all); "
                        "the first one for the table in which all have the same")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (7)")
    parser.add_argument("--threads", type=int, default=2, help="cores that each system may use (2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the tables (extra: plots)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(argv)


def start_all(args: argparse.Namespace, arguments: dict[str, Any]) -> tuple[dict[System, Worker], dict[System, str]]:
    """The workers that started, and why the others did not.

    Raises:
      UsageError: this package's own did not.
    """
    workers: dict[System, Worker] = {}
    failed = {}
    for system in [System(name, dtype) for dtype in args.dtypes for name in (OURS, *args.systems)]:
        print(f"starting {system.name} ({system.dtype})", file=sys.stderr)
        python = args.vllm_python if system.name == "vllm" and args.vllm_python else args.torch_python
        try:
            workers[system] = start(system, python, arguments)
        except WorkerError as error:
            if system.name == OURS:
                raise UsageError(f"{OURS} ({system.dtype}) does not start: {error}") from error
            failed[system] = str(error)
    return workers, failed


def warm_up(workers: dict[System, Worker], loads: dict[str, Requests]) -> tuple[list[Result], Answers]:
    """Every system serves every load once, apart from the rounds.

    Returns:
      (results without rounds, the answers by load and system).
    """
    results = []
    answers = {}
    for name, requests in tqdm(loads.items(), desc="warm-up", disable=None, leave=False):
        for system, worker in workers.items():
            result = Result(system, name, sum(count for _, count in requests))
            results.append(result)
            try:
                answer = worker.run(requests)
            except WorkerError as error:
                result.error = str(error)
                continue
            result.warm_up = answer["seconds"]
            answers[name, system] = answer["tokens"]
    return results, answers


def add_round(results: Sequence[Result], workers: dict[System, Worker], loads: dict[str, Requests]) -> None:
    """Every system that has not failed serves every load once more; the systems take turns."""
    for result in results:
        if result.error is not None:
            continue
        try:
            answer = workers[result.system].run(loads[result.load])
        except WorkerError as error:
            result.error, result.seconds = str(error), []
            continue
        result.seconds.append(answer["seconds"])
        result.kv_reserved, result.kv_used = answer["kv_reserved"], answer["kv_used"]


def check(
    results: Sequence[Result],
    answers: Answers,
    workers: dict[System, Worker],
    loads: dict[str, Requests],
) -> None:
    """Compares every output with this package's in float32, if that is among them."""
    exact = System(OURS, "float32")
    for result in results:
        reference = answers.get((result.load, exact))
        if reference is None or result.error is not None or result.system == exact:
            continue
        requests, score = loads[result.load], workers[exact].score
        try:
            if result.system.dtype == "float32":
                theirs = answers[result.load, result.system]
                result.check = outputs.compare_tokens(requests, reference, theirs, score)
            else:
                result.check = outputs.compare_scores(requests, reference, score, workers[result.system].score)
        except WorkerError as error:
            result.check = {"error": str(error)}


def describe(workers: dict[System, Worker]) -> dict[System, dict[str, Any]]:
    """Of every process: versions, seconds to load, most memory held so far."""
    return {
        system: {"versions": worker.versions, "load_seconds": worker.load_seconds, "peak": worker.peak}
        for system, worker in workers.items()
    }


def run(args: argparse.Namespace) -> None:
    """The whole command; raises UsageError, ValueError or OSError on bad input."""
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    check_outputs(args.json, plot=args.plot)
    if not args.model.is_dir():
        raise UsageError(f"--model: {args.model} is no folder; give one with config.json, weights and tokenizer.json")
    tokenizer = Tokenizer.from_folder(args.model)
    loads = {name: LOADS[name](tokenizer.encode) for name in args.loads}
    arguments = {
        "model": args.model,
        "threads": args.threads,
        "max-len": longest(list(loads.values())),
        "max-seqs": max(map(len, loads.values())),
    }
    workers, failed = start_all(args, arguments)

    def write(results: Sequence[Result]) -> None:
        systems = [{**system._asdict(), **process} for system, process in describe(workers).items()]
        records = [asdict(result) | {"system": result.system._asdict()} for result in results]
        write_json(args.json, "compare_torch", args, systems=systems, results=records)

    try:
        results, answers = warm_up(workers, loads)
        for _ in tqdm(range(args.rounds), desc="rounds", disable=None, leave=False):
            add_round(results, workers, loads)
            if args.json is not None:
                write(results)  # a run that is cut short leaves the rounds it has made
        check(results, answers, workers, loads)
    finally:
        for worker in workers.values():
            worker.close()
    results += [Result(system, name, 0, error=error) for system, error in failed.items() for name in loads]
    print(f"{args.threads} threads, {args.rounds} rounds: medians; warm-up apart\n\nAll in {args.dtypes[0]}:\n")
    print(format_table(report.table(report.same_dtype(results, args.dtypes[0]))))
    print(f"\nEach in its best dtype:\n\n{format_table(report.table(report.best_dtype(results)))}\n")
    print(format_table(report.process_rows(describe(workers))))
    if args.json is not None:
        write(results)
    if args.plot is not None:
        report.plot(args.plot, results, args.dtypes[0])
    if any(result.check and result.check.get("different") for result in results):
        raise UsageError("some answers differ where no near tie explains it: see the tables")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return exit_status(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
