"""Tables of what was compiled, and of what a device did."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.command_line import format_table

_LONGEST_CELL = 160


def outcome(row: Mapping[str, Any]) -> str:
    """ "ok", or in one line what is wrong with a row or why there is none."""
    for name in ("error", "problem", "skipped"):
        if row.get(name):
            text = " ".join(str(row[name]).split()).replace("|", "/")
            return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 3] + "..."
    return "ok"


def compile_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kernel in each program: registers of a thread, bytes spilled, shared memory or VMEM in bytes."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        for kernel, used in (row.get("kernels") or {"-": {}}).items():
            memory = used.get("shared_memory", used.get("vmem"))
            lines.append(
                {
                    "target": row["target"],
                    "program": row["name"],
                    "kernel": kernel,
                    "result": outcome(row),
                    "registers": used.get("registers", "-"),
                    "spilled": used.get("spilled", "-"),
                    "shared memory or VMEM": "-" if memory is None else f"{memory:,}",
                    "temporary bytes": f"{row['temporary_bytes']:,}" if "temporary_bytes" in row else "-",
                }
            )
    return format_table(lines)


def device_report(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Mapping[str, Any]]) -> str:
    """What the device can do, how many cases were right, and the timings against the limits."""
    copy, matmul = limits["copy"], limits["matmul"]
    text = [
        f"{copy['device']}, {copy['implementation']}, jax {copy['jax']}: copy {copy['rate'] / 1e9:.0f} GB/s (read and "
        f"written), product {matmul['rate'] / 1e12:.1f} TFLOP/s in bfloat16"
    ]
    for family in ("decode", "prefill"):
        cases = [row for row in rows if row["family"] == family]
        wrong = [row for row in cases if "error" in row]
        text.append(f"{family}: {len(cases) - len(wrong)} of {len(cases)} cases right")
        text += [f"- {row['name']}: {outcome(row)}" for row in wrong]
    timings = [row for row in rows if row["family"] not in ("limits", "decode", "prefill")]
    lines = [_timing(row, copy["rate"], matmul["rate"]) for row in timings]
    return "\n".join([*text, "", format_table(lines)] if lines else text)


def _timing(row: Mapping[str, Any], bandwidth: float, rate: float) -> dict[str, Any]:
    seconds, flops = row.get("seconds"), row.get("flops")
    note = outcome(row)
    if "largest_difference" in row:
        note = f"differs by {row['largest_difference']:.2g}"
    return {
        "family": row["family"],
        "shape": row["name"],
        "us": "-" if seconds is None else f"{seconds * 1e6:.1f}",
        "bytes": f"{row['bytes']:,}" if seconds else "-",
        "of the copy's bandwidth": f"{row['bytes'] / seconds / bandwidth:.1%}" if seconds else "-",
        "of the product's rate": f"{flops / seconds / rate:.1%}" if seconds and flops else "-",
        "note": note,
    }
