"""Record transformers' logits of SmolLM2-135M-Instruct along one text of 8,000 tokens, near the end of its context.

Run as

    DIR/torch/bin/python tests/data/record_long.py DIR/hf

with the environment and the folder of `record_transformers.py`. It writes `smollm2_long.npz` next to itself:

- `token_ids` uint16 [8000]: the text, some prose and some code put together from parts with a seed;
- `best` uint16 [8000] and `gaps` float32 [8000]: at each position the most likely next id, and by how much it is ahead
  of the second;
- `positions` int32 [64], `ids` uint16 [64, 16] and `logits` float32 [64, 16]: at these positions, the last 32 among
  them, the 16 most likely ids and their logits;
- `versions`: a string.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import transformers
from record_transformers import load_tokenizer
from smollm2_prompts import code, prose

NUM_TOKENS = 8000
NUM_IDS = 16
CHUNK = 500


def long_text() -> str:
    """More text than is needed."""
    rng = random.Random(8)
    return "\n\n".join(part for _ in range(8) for part in (prose(rng, 60), code(rng, 6)))


@torch.inference_mode()
def main() -> None:
    """Read the text in chunks through a cache, keeping what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder written by save_pretrained")
    folder: Path = parser.parse_args().folder
    token_ids = load_tokenizer(folder).encode(long_text(), add_special_tokens=False).ids[:NUM_TOKENS]
    if len(token_ids) != NUM_TOKENS:
        raise ValueError(f"the text has only {len(token_ids)} tokens")
    positions = np.concatenate([np.arange(249, NUM_TOKENS - 32, 249), np.arange(NUM_TOKENS - 32, NUM_TOKENS)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    cache = transformers.DynamicCache(config=model.config)
    best, gaps, ids, logits = [], [], [], []
    for start in range(0, NUM_TOKENS, CHUNK):
        rows = model(torch.tensor([token_ids[start : start + CHUNK]]), cache=cache, use_cache=True).logits[0]
        top = rows.topk(NUM_IDS, dim=-1)
        best.append(top.indices[:, 0].numpy())
        gaps.append((top.values[:, 0] - top.values[:, 1]).numpy())
        here = positions[(positions >= start) & (positions < start + CHUNK)] - start
        ids.append(top.indices.numpy()[here])
        logits.append(top.values.numpy()[here])
        print(f"{start + CHUNK} of {NUM_TOKENS}", flush=True)
    np.savez_compressed(
        Path(__file__).parent / "smollm2_long.npz",
        token_ids=np.array(token_ids, np.uint16),
        best=np.concatenate(best).astype(np.uint16),
        gaps=np.concatenate(gaps),
        positions=positions.astype(np.int32),
        ids=np.concatenate(ids).astype(np.uint16),
        logits=np.concatenate(logits),
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa, float32, cpu",
    )


if __name__ == "__main__":
    main()
