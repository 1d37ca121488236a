"""Models that cannot be loaded: one line on stderr, exit status 2, nothing on stdout."""

import numpy as np
import pytest

from scripts.generate import main


@pytest.fixture
def refused(capsys):
    def refused(model):
        status = main(["--quiet", "--prompt", "hello", "--model", str(model)])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return refused


@pytest.mark.parametrize("model", ["smollm3", "missing.gguf"])
def test_unknown_model(refused, model):
    assert f"cannot load '{model}': give 'smollm2-135m', the path of an existing .gguf file" in refused(model)


def test_folder_without_a_model(refused, tmp_path):
    assert "has no config.json; give a Hugging Face model folder" in refused(tmp_path)


def test_architecture(refused, tiny, tmp_path):
    tiny.fields |= {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    tiny.architecture = "phi3"
    tiny.keys["tokenizer.ggml.model"] = "llama"
    assert "architecture Phi3ForCausalLM (model_type 'phi3') is not supported" in refused(tiny.write_folder(tmp_path))
    assert "architecture 'phi3' is not supported" in refused(tiny.write_gguf(tmp_path / "m.gguf"))


def test_field(refused, tiny, tmp_path):
    tiny.fields["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    assert "rope_scaling.rope_type = 'yarn' is not supported" in refused(tiny.write_folder(tmp_path))


def test_tensor_types(refused, tiny, tmp_path):
    tiny.tensors["model.norm.weight"] = np.ones(32, np.int8)
    assert "model.norm.weight is stored as I8" in refused(tiny.write_folder(tmp_path))
    assert "output_norm.weight is of type I8" in refused(tiny.write_gguf(tmp_path / "m.gguf"))


def test_cut_short(refused, tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    weights = tiny.write_folder(tmp_path / "hf") / "model.safetensors"
    for file in (path, weights):
        file.write_bytes(file.read_bytes()[:-50])
    assert "it is damaged or cut short (tensor 'blk.1.ffn_down.weight' ends past the file's end" in refused(path)
    assert "a .safetensors file is damaged" in refused(weights.parent)


def test_tensors(refused, tiny, tmp_path):
    tiny.tensors["extra"] = tiny.tensors.pop("model.norm.weight")
    assert "missing (1): model.norm.weight; unexpected (1): extra" in refused(tiny.write_folder(tmp_path))


def test_config_of_another_size(refused, tiny, tmp_path):
    tiny.fields["hidden_size"] = 64
    assert "model.embed_tokens.weight is [262, 32] and should be [262, 64]" in refused(tiny.write_folder(tmp_path))
