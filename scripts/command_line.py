"""What the commands of this folder have in common: arguments, input files, errors, tables."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
KV_DTYPES = {**DTYPES, "int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn}


class UsageError(Exception):
    """Bad input: one line for the user."""


class Parser(argparse.ArgumentParser):
    """Keeps the description's lines as they are, and raises UsageError instead of printing the usage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Called by argparse on a bad command line."""
        raise UsageError(f"{message}; --help lists what there is")


def exit_status(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit status: 0, 2 for bad input (one line on stderr), 130 when interrupted."""
    try:
        command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (UsageError, ValueError, OSError, ModuleNotFoundError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSONL file, each after where it stands ("FILE, line 3"); empty lines are passed over.

    Raises:
      UsageError: the file cannot be read, or a line is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 inside a string
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON ({error})") from error
        yield where, value


def check_outputs(*paths: Path | None, plot: Path | None = None) -> None:
    """Finds out whether files can be written, without touching them, and whether a picture can be drawn.

    Raises:
      UsageError: a file cannot be written.
      ModuleNotFoundError: a picture is wanted and matplotlib is missing.
    """
    for path in (*paths, plot):
        if path is None:
            continue
        try:
            if path.exists():
                os.close(os.open(path, os.O_WRONLY))
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if plot is not None and find_spec("matplotlib") is None:
        raise ModuleNotFoundError("pictures need matplotlib: install the extra, `uv sync --extra plots`")


def machine() -> dict[str, Any]:
    """Where and when figures were taken."""
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "jax": jax.__version__,
        "date": date.today().isoformat(),
    }


def write_json(path: Path, command: str, args: argparse.Namespace, **results: Any) -> None:
    """Writes results, with the command, its arguments and the machine that they come from."""
    record = {"command": command, "arguments": vars(args), "machine": machine(), **results}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join("---" for _ in names) + "|"]
    for row in rows:
        cells = [f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
