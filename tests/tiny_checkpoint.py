"""A tiny Llama with random weights and a byte-level tokenizer, written in both checkpoint formats."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<|end|>", "<s>", "<|eot|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes, the merged tokens."""
    return [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in MERGES)]


@dataclass
class TinyModel:
    """Weights by their Hugging Face names, float32, [out, in]; change the fields before writing."""

    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]
    keys: dict[str, Any] = field(default_factory=dict)  # further or other GGUF metadata; None leaves one out
    architecture: str = "llama"

    def write_folder(self, folder: Path, save: Callable[..., None] = save_file) -> Path:
        """A Hugging Face folder with one weights file and a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write_config(folder)
        save(self.tensors, str(folder / "model.safetensors"))
        write_tokenizer(folder)
        return folder

    def write_shards(self, folder: Path) -> Path:
        """The same in two shards with an index."""
        self.write_folder(folder)
        (folder / "model.safetensors").unlink()
        names = sorted(self.tensors)
        shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for shard, members in shards.items():
            save_file({name: self.tensors[name] for name in members}, str(folder / shard))
        weight_map = {name: shard for shard, members in shards.items() for name in members}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    def write_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.fields))

    def write_gguf(
        self,
        path: Path,
        kind: str = "F32",
        extra: Mapping[str, np.ndarray] | None = None,
        stored_as: Mapping[str, tuple[str, np.ndarray]] | None = None,
    ) -> Path:
        """A GGUF file; matrices stored as `kind`, vectors as float32, a llama's q and k in llama.cpp's row order.

        `stored_as` gives tensors by their names there, each as a type and rows of stored bytes, in place of their own.
        """
        writer = gguf.GGUFWriter(path, self.architecture)
        fields = self.fields
        keys = {
            "llama.block_count": fields["num_hidden_layers"],
            "llama.context_length": fields["max_position_embeddings"],
            "llama.embedding_length": fields["hidden_size"],
            "llama.feed_forward_length": fields["intermediate_size"],
            "llama.attention.head_count": fields["num_attention_heads"],
            "llama.attention.head_count_kv": fields["num_key_value_heads"],
            "llama.rope.freq_base": float(fields.get("rope_theta", 10000.0)),
            "llama.attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": vocabulary(),
            "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS) + [1] * (256 + len(MERGES)),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        } | self.keys
        for key, value in keys.items():
            if key == "general.alignment":
                writer.add_custom_alignment(value)
            elif value is not None:
                _add(writer, key.replace("llama.", f"{self.architecture}."), value)
        for name, array in {**self.tensors, **(extra or {})}.items():
            for ours, theirs in GGUF_NAMES.items():
                name = name.replace(ours, theirs)
            heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
            for part, count in heads.items():
                if part in name and self.architecture == "llama":
                    array = interleave_rows(array, count)
            if name in (stored_as or {}):
                kind_of_rows, rows = stored_as[name]
                writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind_of_rows])
            elif array.ndim == 1:
                writer.add_tensor(name, array)
            else:
                stored = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, one row at a time: rows i and i + D / 2 of a head become neighbours."""
    out, half = np.empty_like(weight), weight.shape[0] // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + half + i]
    return out


def tiny_tokenizer() -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_tiny() -> TinyModel:
    """E = 32, 4 heads of 8 over 2 KV heads, F = 64, 2 layers, an untied head."""
    rng = np.random.default_rng(0)
    hidden, inner, num_kv = 32, 64, 16
    vocab = len(vocabulary())
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (num_kv, hidden),
            prefix + "self_attn.v_proj.weight": (num_kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [0, 2],
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return TinyModel(fields, tensors)
