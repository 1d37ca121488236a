"""Tables and picture of a comparison."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.compare.outputs import describe
from scripts.compare.process import System

OURS = "paged_jax"
_MEBI = 2**20


@dataclass
class Result:
    """One system on one load.

    Attributes:
      system, load: which.
      num_tokens: tokens generated in a round.
      warm_up: seconds of the first run, compilation and allocation among them.
      seconds: of each round.
      kv_reserved, kv_used: bytes of the cache that the last round set aside, and the most that held tokens; None where
        the system does not say.
      check: what comparing its output gave; None for the reference itself.
      error: why it has no figures.
    """

    system: System
    load: str
    num_tokens: int
    warm_up: float = 0.0
    seconds: list[float] = field(default_factory=list)
    kv_reserved: int | None = None
    kv_used: int | None = None
    check: dict[str, Any] | None = None
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Output tokens per second of the rounds."""
        return [self.num_tokens / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """Their median."""
        return statistics.median(self.rates)


def same_dtype(results: Sequence[Result], dtype: str) -> list[Result]:
    """The results in one dtype."""
    return [result for result in results if result.system.dtype == dtype]


def best_dtype(results: Sequence[Result]) -> list[Result]:
    """Of every system and load the fastest dtype; one that failed only if all did."""
    best: dict[tuple[str, str], Result] = {}
    for result in results:
        key = (result.load, result.system.name)
        if key not in best or (result.seconds and (not best[key].seconds or result.rate > best[key].rate)):
            best[key] = result
    return list(best.values())


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each system and load, with the ratio of this package's speed to its own (the median of the rounds'
    ratios)."""
    ours = {result.load: result for result in results if result.system.name == OURS}
    rows = []
    for result in sorted(results, key=lambda result: list(ours).index(result.load) if result.load in ours else 0):
        row = {"load": result.load, "system": result.system.name, "dtype": result.system.dtype}
        if result.seconds:
            row |= {
                "tokens/s": f"{result.rate:.1f}",
                "range": f"{min(result.rates):.1f} to {max(result.rates):.1f}",
                "paged_jax is faster by": _ratio(ours.get(result.load), result),
                "warm-up s": f"{result.warm_up:.1f}",
                "KV reserved MiB": _mebibytes(result.kv_reserved),
                "KV used MiB": _mebibytes(result.kv_used),
                "outputs": describe(result.check),
            }
        else:
            names = ("tokens/s", "range", "paged_jax is faster by", "warm-up s", "KV reserved MiB", "KV used MiB")
            row |= dict.fromkeys(names, "") | {"outputs": f"not run: {result.error}"}
        rows.append(row)
    return rows


def process_rows(processes: Mapping[System, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What starting each system took, and the most memory that it held."""
    return [
        {
            "system": system.name,
            "dtype": system.dtype,
            "load s": f"{process['load_seconds']:.1f}",
            "peak resident MiB": _mebibytes(process["peak"].get("resident")),
            "peak device MiB": _mebibytes(process["peak"].get("device")),
            "runs on": ", ".join(f"{name} {version}" for name, version in process["versions"].items()),
        }
        for system, process in processes.items()
    ]


def plot(path: Path, results: Sequence[Result], dtype: str) -> None:
    """Draws the medians of both tables, whiskers from the slowest round to the fastest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    loads = list(dict.fromkeys(result.load for result in results))
    systems = list(dict.fromkeys(result.system.name for result in results))
    colours = dict(zip(systems, ("#bb5566", "#4477aa", "#88ccee", "#228833", "#ddaa33", "#777777"), strict=False))
    titles = (f"all in {dtype}", "each in its best dtype")
    for axes, title, shown in zip(panels, titles, (same_dtype(results, dtype), best_dtype(results)), strict=True):
        width = 0.8 / len(systems)
        for place, name in enumerate(systems):
            own = [result for result in shown if result.system.name == name and result.seconds]
            x = [loads.index(result.load) + (place - (len(systems) - 1) / 2) * width for result in own]
            rates = [result.rate for result in own]
            below = [result.rate - min(result.rates) for result in own]
            above = [max(result.rates) - result.rate for result in own]
            axes.bar(x, rates, width, color=colours[name], label=name, yerr=[below, above], capsize=2, ecolor="#333333")
        axes.set_title(title)
        axes.set_ylabel("output tokens/s")
        axes.set_xticks(range(len(loads)), loads)
        axes.tick_params(labelbottom=True)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def _ratio(ours: Result | None, result: Result) -> str:
    if ours is None or not ours.seconds or ours is result:
        return ""
    return f"{statistics.median(b / a for a, b in zip(ours.seconds, result.seconds, strict=True)):.2f}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / _MEBI:.0f}"
