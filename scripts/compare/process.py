"""A system to compare, in a process of its own that lives for the whole run."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WORKERS = {"paged_jax": ROOT / "scripts" / "compare" / "paged_worker.py"}
"""Programs by system; all others are the baselines'."""

BASELINE = ROOT / "scripts" / "compare" / "torch_worker.py"


class System(NamedTuple):
    """What is compared: a way to generate, and the dtype of weights and cache."""

    name: str
    dtype: str


class WorkerError(Exception):
    """A system that does not start, or did not answer."""


class Worker:
    """Starts the process of a system and waits until its model is loaded.

    Args:
      system: which one.
      python: the Python that runs it.
      arguments: further arguments of the worker, by name.

    Attributes:
      versions: of what it runs on.
      load_seconds: time from the start of the process's work to the loaded model.
      peak: most bytes held at once so far, by kind of memory.

    Raises:
      WorkerError: the process does not start, or its libraries or the model cannot be loaded.
    """

    def __init__(self, system: System, python: str, arguments: Mapping[str, Any]) -> None:
        self.system = system
        command = [python, str(WORKERS.get(system.name, BASELINE)), "--system", system.name, "--dtype", system.dtype]
        command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        ours = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        self.peak: dict[str, int] = {}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (close() closes it)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | (ours if system.name in WORKERS else {}),
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"cannot start {python}: {error.strerror}") from error
        try:
            ready = self._read()
        except WorkerError:
            self.close()
            raise
        self.versions: dict[str, str] = ready["versions"]
        self.load_seconds: float = ready["load_seconds"]

    def run(self, requests: Sequence[tuple[Sequence[int], int]]) -> dict[str, Any]:
        """Answers requests; raises WorkerError if it cannot."""
        return self._ask({"run": requests})

    def score(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Scores tokens; raises WorkerError if it cannot."""
        return self._ask({"score": token_ids})

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        answer = self._read()
        self.peak = answer["peak"]
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(" ".join(answer["error"].split())[:200])
        return answer

    def _ended(self) -> WorkerError:
        status = self._process.wait()
        self._log.seek(0)
        last = next((line.strip() for line in reversed(self._log.readlines()) if line.strip()), "it said nothing")
        return WorkerError(f"the process ended with status {status}: {last[:200]}")


def start(system: System, torch_python: str, arguments: Mapping[str, Any]) -> Worker:
    """The worker of a system: ours under this Python, baselines under theirs."""
    return Worker(system, sys.executable if system.name in WORKERS else torch_python, arguments)
