"""Make tiny random checkpoints of every supported architecture and record transformers' logits for them.

Run as

    DIR/torch/bin/python tests/data/record_tiny.py

where `DIR/torch` is a virtual environment with torch (CPU), transformers and numpy (the versions are written to the
output). It writes, in `tiny/` next to itself, for each of `ARCHITECTURES` the folder that `save_pretrained` makes of
a model with random weights in bfloat16 (a few thousand numbers), and

- `logits.npz`: for each architecture float32 [85, vocab_size], what `record` gives for it;
- `record.json`: the versions.

The weights are large enough that windows, caps, biases and norms all matter: a model that lacks one of them is far
from these logits.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

FOLDER = Path(__file__).parent / "tiny"
PREFILLS = (40, 5)
"""Prompt lengths: one beyond every window, one that outgrows the windows while it decodes."""
NUM_DECODED = 20
COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}, rms_norm_eps=1e-5
    ),
    "smollm2": LlamaConfig(**COMMON, rope_parameters={"rope_theta": 1e5}, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON, sliding_window=9, head_dim=6),
    "qwen2": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True),
    "gemma2": Gemma2Config(
        **{**COMMON, "num_hidden_layers": 4},
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
}  # fmt: skip


def token_ids() -> list[list[int]]:
    """The sequences, the decoded tokens included: some whole numbers that any program can make."""
    return [[3 + (7 * i * i + 11 * i + 5 * n) % 45 for i in range(prefill + NUM_DECODED)]
            for n, prefill in enumerate(PREFILLS)]  # fmt: skip


def random_model(config: PreTrainedConfig, seed: int) -> Any:
    """A model whose weights are drawn anew, rounded to bfloat16."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rng = np.random.default_rng(seed)
    for name, weight in model.named_parameters():
        noise = torch.tensor(rng.standard_normal(tuple(weight.shape)), dtype=torch.float32)
        if name.endswith("norm.weight"):
            noise = 0.4 * noise + (0.0 if config.model_type == "gemma2" else 1.0)
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            noise = noise * 1.5 * weight.shape[1] ** -0.5  # attention that looks at few tokens
        elif weight.ndim == 2 and "embed" not in name:
            noise = noise * weight.shape[1] ** -0.5
        weight.data = noise
    return model.to(torch.bfloat16)


@torch.inference_mode()
def record(model: Any) -> np.ndarray:
    """Logits float32 [tokens, vocab_size] of all sequences one after the other, through transformers' cache: the
    prompt at once, then a token at a time."""
    rows = []
    for ids, prefill in zip(token_ids(), PREFILLS, strict=True):
        cache = transformers.DynamicCache(config=model.config)
        steps = [ids[:prefill], *([token] for token in ids[prefill:])]
        rows += [model(torch.tensor([step]), cache=cache, use_cache=True).logits[0].numpy() for step in steps]
    return np.concatenate(rows)


def load(folder: Path) -> Any:
    """The saved model, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def main() -> None:
    """Write everything."""
    logits = {}
    for seed, (name, config) in enumerate(ARCHITECTURES.items()):
        folder = FOLDER / name
        random_model(config, seed).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        logits[name] = record(load(folder))
        print(f"{name}: largest logit {np.abs(logits[name]).max():.2f}", flush=True)
    np.savez(FOLDER / "logits.npz", **logits)
    metadata = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "device": "cpu",
        "attention": "eager",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "DIR/torch/bin/python tests/data/record_tiny.py",
    }
    (FOLDER / "record.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
