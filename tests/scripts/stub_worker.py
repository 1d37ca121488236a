"""Stands in for a system in the tests of compare_torch.py: answers at once, with numbers that are easy to check.

static does not load, continuous fails when it runs, static-compiled ends; vllm's first answer has another third token.
"""

import json
import sys
import time

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
system, dtype = arguments["--system"], arguments["--dtype"]


def answer(record):
    print(json.dumps(record), flush=True)


def run(requests):
    if system == "continuous":
        return {"error": "no room\nfor this"}
    if system == "static-compiled":
        sys.exit("compiler missing")
    tokens = [[(sum(prompt) + i) % 50 for i in range(count)] for prompt, count in requests]
    if system == "vllm":
        tokens[0][2] += 1
    time.sleep(0.02 if dtype == "float32" else 0.01)
    seconds = {"paged_jax": 1.0, "dense": 2.0, "vllm": 4.0}[system] / (1 if dtype == "float32" else 2)
    return {"tokens": tokens, "seconds": seconds, "kv_reserved": 3 << 20, "kv_used": None}


def score(token_ids):
    exact = system == "paged_jax" and dtype == "float32"
    count = len(token_ids) - 1
    likeliest = [token if exact or i % 4 else -1 for i, token in enumerate(token_ids[1:])]
    return {"logprobs": [-1.0 if exact else -1.25] * count, "likeliest": likeliest, "gaps": [1e-3] * count}


if system == "static":
    answer({"error": "ModuleNotFoundError: No module named 'torch'"})
    sys.exit()
answer({"versions": {"stub": "1"}, "load_seconds": 0.5})
for line in sys.stdin:
    question = json.loads(line)
    record = run(question["run"]) if "run" in question else score(question["score"])
    answer({**record, "peak": {"resident": 5 << 20}})
