"""Serves this package's engine to compare_torch.py, as torch_worker.py serves a baseline: the same arguments, questions
and answers; a score also tells the gap between the two likeliest tokens' logits."""

import json
import os
import resource
import sys
import time
from typing import Any

import jax

from models import registry
from models.transformer import functional
from paged_jax import Engine, EngineConfig, Request
from scripts.benchmarks.perplexity import teacher_forced
from scripts.command_line import DTYPES, Parser


class Paged:
    """The engine, made anew for every shape of load, with a pool that holds the whole load.

    Args:
      model: a Hugging Face folder, or what else `models.registry.load` takes.
      dtype: of weights and pages.
    """

    def __init__(self, model: str, dtype: str) -> None:
        self._checkpoint = registry.load(model, dtype=DTYPES[dtype])
        self._model = functional(self._checkpoint.config)
        self._dtype = DTYPES[dtype]
        self._engines: dict[tuple[int, int], Engine] = {}
        self.versions = {"jax": jax.__version__, "device": jax.default_backend()}

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Answers all; what was cached before is forgotten."""
        engine = self._engine(requests)
        engine.reset_prefix_cache()
        engine.stats.peak_pages = 0
        asked = [Request(prompt, max_tokens=count, ignore_eos=True) for prompt, count in requests]
        started = time.perf_counter()
        answers = engine.generate(asked)
        seconds = time.perf_counter() - started
        return {
            "tokens": [answer.token_ids for answer in answers],
            "seconds": seconds,
            "kv_reserved": engine.layout.pool_bytes,
            "kv_used": engine.stats.peak_pages * engine.layout.bytes_per_page,
        }

    def score(self, token_ids: list[int]) -> dict[str, Any]:
        """Of every token but the first: its log probability, the likeliest token there, and by how much its logit is
        above the next one's."""
        scores = teacher_forced(self._checkpoint, token_ids, self._dtype)
        return {name: values.tolist() for name, values in scores._asdict().items()}

    def peak_bytes(self) -> dict[str, int]:
        """Most memory that this process, and on an accelerator its device, has held at once."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
        device = jax.devices()[0].memory_stats() or {}
        return peak | ({"device": device["peak_bytes_in_use"]} if "peak_bytes_in_use" in device else {})

    def _engine(self, requests: list[tuple[list[int], int]]) -> Engine:
        max_len = max(len(prompt) + count for prompt, count in requests)
        key = (len(requests), max_len)
        if key not in self._engines:
            layout = self._model.kv_layout(num_pages=2, dtype=self._dtype)
            num_pages = sum(layout.pages_for(len(prompt) + count) for prompt, count in requests) + 1
            layout = self._model.kv_layout(num_pages=num_pages + len(requests), dtype=self._dtype)
            config = EngineConfig(max_seqs=len(requests), max_model_len=max_len, max_tokens_per_step=512)
            self._engines[key] = Engine(self._model, self._checkpoint.params, layout, None, config)
        return self._engines[key]


def main() -> None:
    """Loads the model, says so, and answers until stdin ends."""
    parser = Parser()
    for option in ("--system", "--model", "--dtype"):
        parser.add_argument(option, required=True)
    for option in ("--threads", "--max-len", "--max-seqs"):
        parser.add_argument(option, type=int, required=True)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other systems need memory too
    if hasattr(os, "sched_setaffinity"):
        # Before JAX starts its threads, as many as there are cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])

    def answer(record: dict[str, Any]) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    started = time.perf_counter()
    system = Paged(args.model, args.dtype)
    answer({"versions": system.versions, "load_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        question = json.loads(line)
        record = system.run(question["run"]) if "run" in question else system.score(question["score"])
        answer({**record, "peak": system.peak_bytes()})


if __name__ == "__main__":
    main()
