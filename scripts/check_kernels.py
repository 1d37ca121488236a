"""Checks the attention kernels: interpreted on a CPU, compiled for chips that are not here, or run on one that is.

--interpret           the contract suite, every implementation, with race detection
--compile TARGET...   what each program takes on each chip; its compilers are the dependency group aot:
                      uv run --isolated --group aot scripts/check_kernels.py --compile sm_90 v5e
--device              right or wrong, and how fast, on the GPU or TPU that JAX finds; ends within 330 seconds

The exit code is 1 if anything required fails. The last line is a summary.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.kernels import children, device, programs, report
from scripts.kernels.cases import SEED

_THREADS: Final = 16  # of XLA's own: each interpreted warpgroup waits in one, and with too few all wait for ever
_DEVICE_SECONDS: Final = 330.0
_WATCHDOG_SECONDS: Final = 60.0  # without a row
_MAX_FAILURES: Final = 3  # of one family on a device
_JUDGED: Final = ("limits", "decode", "prefill", "attention", "model")
"""Families whose errors fail the check; the others are there for comparison."""

INTERPRETED: Final = (
    ("tests/pallas_kernels",),
    ("tests/pallas_kernels/test_mosaic_gpu.py", "-m", "slow", "-k", "not full_sample"),
)
"""What pytest is given, one run each: the default selection, and the GPU kernels, which are not in it."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--interpret", action="store_true", help="run the contract suite on this CPU")
    modes.add_argument("--compile", choices=programs.TARGETS, nargs="+", metavar="TARGET", help="compile for chips: "
                       f"{' '.join(programs.TARGETS)}; all must compile for {' '.join(programs.REQUIRED)}")  # fmt: skip
    modes.add_argument("--device", action="store_true", help="check and time on the device that is here")
    parser.add_argument("--main", action="store_true", help="with --compile: the main shapes only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --compile: also write the figures here")
    parser.add_argument("--output", type=Path, default=Path("device_check"), metavar="FOLDER",
                        help="with --device: device.jsonl and device.md go here (device_check)")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="with --device: sizes that a CPU computes at once")
    return parser.parse_args(argv)


def interpret() -> int:
    """Runs the suites; returns the exit code."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    environment = os.environ | {"NPROC": str(_THREADS)}
    codes = [
        subprocess.run([*command, *suite], cwd=children.ROOT, env=environment, check=False).returncode
        for suite in INTERPRETED
    ]
    passed = codes.count(0)
    print(f"interpret: {passed} of {len(codes)} suites passed")
    return int(passed < len(codes))


def compile_for(targets: Sequence[str], *, main_only: bool, json_path: Path | None) -> int:
    """Compiles every program of each target; returns the exit code."""
    for target in targets:
        missing = programs.missing_compiler(target)
        if missing is not None:
            print(f"--compile {target}: {missing}; run `uv run --isolated --group aot scripts/check_kernels.py`")
            return 2
    rows = []
    for target in targets:
        for row in programs.compile_all(target, list(programs.MAIN if main_only else programs.programs(target))):
            rows.append(row)
            print(f"{target} {row['name']}: {report.outcome(row)}", file=sys.stderr, flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")
    print(report.compile_table(rows))
    failed = [row for row in rows if report.outcome(row) != "ok"]
    required = [row for row in failed if row["target"] in programs.REQUIRED]
    print(
        f"compile: {len(rows) - len(failed)} of {len(rows)} programs for {' '.join(targets)}; "
        f"{len(required)} required ones failed{': ' * bool(required)}"
        + ", ".join(f"{row['target']} {row['name']}" for row in required)
    )
    return int(bool(required))


def check_device(size: str, output: Path) -> int:
    """Runs the families of `scripts.kernels.device`, each in a process of its own; returns the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    limits: dict[str, dict[str, Any]] = {}
    names: dict[str, list[str]] = {"limits": ["copy", "matmul"]}
    with (output / "device.jsonl").open("w", encoding="utf-8") as file:
        for family in device.FAMILIES:
            found = children.rows(
                [sys.executable, "-m", "scripts.kernels.device", size, family],
                names[family],
                environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PAGED_JAX_SEED": str(SEED)},
                silence=_WATCHDOG_SECONDS,
                deadline=started + _DEVICE_SECONDS,
                max_failures=_MAX_FAILURES,
            )
            for row in found:
                rows.append({"family": family, **row})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(f"{time.monotonic() - started:5.0f} s  {family} {row['name']}: {report.outcome(row)}", flush=True)
            if family == "limits":
                limits = {row["name"]: row for row in rows if "rate" in row}
                if len(limits) < len(names["limits"]):
                    print(f"device: {next((row['error'] for row in rows if 'error' in row), 'no time left')}")
                    return 1
                names = device.names(size, limits["copy"]["implementation"])
    text = report.device_report(rows, limits)
    (output / "device.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    wanted = sum(map(len, names.values()))
    failed = [row for row in rows if "error" in row and row["family"] in _JUDGED]
    print(
        f"device: {len(rows)} of {wanted} rows in {time.monotonic() - started:.0f} s; "
        f"{len(failed)} failed{': ' * bool(failed)}" + ", ".join(f"{row['family']} {row['name']}" for row in failed)
    )
    return int(bool(failed))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one kind of check."""
    args = parse_arguments(argv)
    if args.interpret:
        return interpret()
    if args.compile:
        return compile_for(args.compile, main_only=args.main, json_path=args.json)
    return check_device("tiny" if args.tiny else "full", args.output)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that children are ended
    sys.exit(main())
