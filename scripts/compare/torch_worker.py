"""Serves one PyTorch baseline to compare_torch.py: JSON lines in, JSON lines out.

Stands alone, since it runs under another Python: it imports torch and transformers or vllm, and nothing of ours.

systems: dense (transformers generate, a cache that grows), static (a static cache), static-compiled (the same with
torch.compile), continuous (transformers' paged continuous batching), vllm.

{"run": [[token ids, tokens to generate], ...]} gives {"tokens", "seconds", "kv_reserved", "kv_used"} (bytes, null where
the system does not say); {"score": token ids} gives {"logprobs", "likeliest"} of every token but the first. Both are
greedy and ignore end tokens; scores of all transformers systems come from one plain forward pass. What fails gives
{"error"}.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from typing import Any

GPU_SHARE = 0.2
"""Of a GPU's memory for one vllm: all systems live at the same time."""

TRANSFORMERS = ("dense", "static", "static-compiled", "continuous")


class Transformers:
    """transformers, in one of its ways to generate."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        torch.set_num_threads(args.threads)
        self.torch, self.transformers, self.system = torch, transformers, args.system
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        self.model.eval().to(self.device)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": self.device}
        config = self.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        itemsize = getattr(torch, args.dtype).itemsize
        self.bytes_per_token = config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * itemsize

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Answers all of them, greedily."""
        tokens, seconds, reserved = (self.continuous if self.system == "continuous" else self.generate)(requests)
        used = sum(len(prompt) + count for prompt, count in requests)
        return {
            "tokens": [answer[:count] for answer, (_, count) in zip(tokens, requests, strict=True)],
            "seconds": seconds,
            "kv_reserved": reserved * self.bytes_per_token,
            "kv_used": used * self.bytes_per_token,
        }

    def generate(self, requests: list[tuple[list[int], int]]) -> tuple[list[list[int]], float, int]:
        """One batch, padded on the left, until its longest answer is there."""
        torch, transformers = self.torch, self.transformers
        width, count = max(len(prompt) for prompt, _ in requests), max(count for _, count in requests)
        config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        if self.system != "dense":
            config.cache_implementation = "static"
            config.disable_compile = self.system == "static"
            if not config.disable_compile:
                config.compile_config = transformers.CompileConfig()
                config.compile_config._compile_all_devices = True
        started = time.perf_counter()
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests]).to(self.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]).to(self.device)
        with torch.inference_mode(self.system != "static-compiled"), torch.no_grad():
            out = self.model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
        tokens = out[:, width:].tolist()
        return tokens, time.perf_counter() - started, len(requests) * (width + count)

    def continuous(self, requests: list[tuple[list[int], int]]) -> tuple[list[list[int]], float, int]:
        """A pool with room for the whole load; making it is left out of the time."""
        config = self.transformers.GenerationConfig(
            max_new_tokens=max(count for _, count in requests), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = self.transformers.generation.ContinuousBatchingConfig(max_batch_tokens=512)
        pages = sum(-(-(len(prompt) + count) // batching.page_size) for prompt, count in requests)
        batching.num_blocks = max(16, pages + 8)
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=60
        ) as manager:
            started = time.perf_counter()
            ids = [manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1) for prompt, count in requests]
            answers: dict[str, list[int]] = {}
            while len(answers) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching stopped before all answers were there")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    answers[result.request_id] = list(result.generated_tokens)
            seconds = time.perf_counter() - started
        return [answers[i] for i in ids], seconds, batching.num_blocks * batching.page_size

    def score(self, token_ids: list[int]) -> dict[str, Any]:
        """Log probability of every token but the first, and the likeliest token at its place."""
        torch = self.torch
        with torch.inference_mode():
            ids = torch.tensor([token_ids]).to(self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
            return {"logprobs": logprobs.tolist(), "likeliest": logits.argmax(dim=-1).tolist()}


class Vllm:
    """vllm in this process, prefix caching on; what it caches is forgotten before every run."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(args.kv_gib),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
        )
        torch, vllm = (importlib.import_module(name) for name in ("torch", "vllm"))
        torch.set_num_threads(args.threads)
        on_gpu = torch.cuda.is_available()
        self.vllm = vllm
        self.engine = vllm.LLM(
            model=args.model,
            dtype=args.dtype,
            enforce_eager=not on_gpu,
            max_model_len=args.max_len,
            max_num_seqs=args.max_seqs,
            enable_prefix_caching=True,
            **({"gpu_memory_utilization": GPU_SHARE} if on_gpu else {}),
        )
        self.versions = {"torch": torch.__version__, "vllm": vllm.__version__, "device": "cuda" if on_gpu else "cpu"}
        self.kv_reserved = None if on_gpu else args.kv_gib * 2**30

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Answers all of them, greedily."""
        self.engine.reset_prefix_cache()
        params = [
            self.vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        started = time.perf_counter()
        out = self.engine.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in out]
        return {"tokens": tokens, "seconds": seconds, "kv_reserved": self.kv_reserved, "kv_used": None}

    def score(self, token_ids: list[int]) -> dict[str, Any]:
        """Log probability of every token but the first, and the likeliest token at its place."""
        params = self.vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        (out,) = self.engine.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        logprobs: list[float] = []
        likeliest: list[int] = []
        for token, choices in zip(token_ids[1:], out.prompt_logprobs[1:], strict=True):
            logprobs.append(choices[token].logprob)
            likeliest.append(max(choices, key=lambda choice: choices[choice].logprob))
        return {"logprobs": logprobs, "likeliest": likeliest}


def peak_bytes() -> dict[str, int]:
    """Most memory that this process, and on a GPU its device, has held at once."""
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak["device"] = torch.cuda.max_memory_reserved()
    return peak


def main() -> None:
    """Loads the model, says so, and answers until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, required=True)
    parser.add_argument("--kv-gib", type=int, default=2)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # libraries print to stdout too: that goes to stderr
    os.dup2(2, 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])

    def answer(record: dict[str, Any]) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    started = time.perf_counter()
    system: Transformers | Vllm
    try:
        system = Transformers(args) if args.system in TRANSFORMERS else Vllm(args)
    except Exception as error:  # whatever a library raises is the answer
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"versions": system.versions, "load_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            record = system.run(question["run"]) if "run" in question else system.score(question["score"])
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {error}"}
        answer({**record, "peak": peak_bytes()})


if __name__ == "__main__":
    main()
