"""Work in a child process that may crash or hang: what it had done by then is kept, and the rest goes on without it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[2]
END_SECONDS: Final = 10.0
"""Time for a process to end once it has nothing more to say."""


def rows(
    command: Sequence[str],
    names: Sequence[str],
    *,
    environment: Mapping[str, str],
    silence: float,
    deadline: float | None = None,
    max_failures: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Runs `command NAME...`, which prints a line of JSON for each name in turn, and yields these.

    For a name at which the process ends or says nothing for too long there is a row {"name", "error"}, and another
    process takes the names after it.

    Args:
      command: program and first arguments; runs in the repository's root, which is importable there.
      names: the rest of its arguments.
      environment: what is added to this process' own.
      silence: seconds after which a process that prints nothing is killed.
      deadline: `time.monotonic()` at which everything ends; names not reached have no row.
      max_failures: after so many names with an error the others have no row.
    """
    left, failures = list(names), 0
    while left and (max_failures is None or failures < max_failures):
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            child = subprocess.Popen(
                [*command, *left], cwd=ROOT, env=_environment(environment), stdout=subprocess.PIPE, stderr=stderr,
                text=True, start_new_session=True,
            )  # fmt: skip
            try:
                reason = None
                for line in _lines(child, silence, deadline):
                    if line is None:
                        reason = f"nothing for {silence:.0f} s: killed"
                    elif line.startswith("{"):
                        row = json.loads(line)
                        left.remove(row["name"])
                        yield row
            finally:
                _kill(child)
            if deadline is not None and time.monotonic() >= deadline:
                return
            if left:
                failures += 1
                stderr.seek(0)
                yield {"name": left.pop(0), "error": reason or _reason(stderr.read(), child.returncode)}


def _lines(child: subprocess.Popen[str], silence: float, deadline: float | None) -> Iterator[str | None]:
    """What a process prints, until it ends or the deadline; a last None if it says nothing for too long."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    assert child.stdout is not None
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    while True:
        left = float("inf") if deadline is None else deadline - time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(silence, left)))
        except queue.Empty:
            if left > silence:
                yield None
            return
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang at its end, too
                child.wait(timeout=END_SECONDS)
            return
        yield line


def _read(stdout: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def _kill(child: subprocess.Popen[str]) -> None:
    """Ends a process and what it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | dict(more)


def _reason(stderr: str, returncode: int) -> str:
    """The end of what a process wrote: from the last line that names an exception."""
    lines = stderr.strip().splitlines() or ["it wrote nothing"]
    named = [i for i, line in enumerate(lines) if line[:1].isalpha() and "Error" in line.split(":")[0]]
    message = "\n".join(lines[named[-1] if named else -1 :])[:2000]
    return message if returncode > 0 else f"exit code {returncode}: {message}"
