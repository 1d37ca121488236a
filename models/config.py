"""The static description of a transformer: what a checkpoint's metadata says about its shapes."""

import math
from dataclasses import dataclass
from typing import Literal

MAX_LAYERS = 10_000
"""More than any model has: a damaged file must not make a list of a billion layers."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class LinearRopeScaling:
    """Every frequency divided by `factor` ("rope_type": "linear" in config.json; see `models.rope`)."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive("rope scaling's factor", self.factor)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 ("rope_type": "llama3" in config.json; see `models.rope`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _check_positive(f"rope scaling's {name}", getattr(self, name))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling's low_freq_factor must be below its high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes and constants of a decoder of the Llama family; the defaults are those of Llama itself.

    Attributes:
      vocab_size: rows of the embedding and of the head.
      hidden_size: E, the width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads; a multiple of num_kv_heads.
      num_kv_heads: key/value heads; each serves num_heads / num_kv_heads query heads (GQA).
      head_dim: width of one head.
      max_model_len: the longest sequence, in tokens, that the model was made for.
      rope_theta: base of the rotary position embedding.
      rope_scaling: None for the plain rotary embedding.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the head is the embedding's own array.
      sliding_windows: for each layer the keys that a query looks back on, itself included, or None for all; None
        when no layer has a window (Mistral, Gemma 2).
      qkv_bias: q, k and v have biases (Qwen2).
      qk_norm: RMSNorm over every head of q and k before the rotary embedding (Qwen3).
      activation: of the MLP's gate; "gelu_tanh" is GELU in its tanh form (Gemma 2).
      post_norms: further RMSNorms after attention and after the MLP (Gemma 2).
      norm_offset: added to the weights of every RMSNorm: 1 where files store them less one (Gemma 2).
      embed_scale: factor on the embedding's output (Gemma 2: sqrt(E)).
      attention_scale: factor on the attention's logits; None for head_dim ** -0.5.
      attention_soft_cap: `cap * tanh(logit / cap)` on the attention's logits, or None (Gemma 2).
      final_soft_cap: the same on the model's logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rope_theta: float = 10000.0
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None

    @property
    def widest_window(self) -> int | None:
        """Keys that any layer looks back on at most; None if some layer sees everything."""
        windows = self.sliding_windows or (None,)
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers",
            "num_heads", "num_kv_heads", "head_dim", "max_model_len",
        )  # fmt: skip
        for name in sizes:
            most = MAX_LAYERS if name == "num_layers" else _INT32_MAX
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be at least 1 and at most {most:,}, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("rope_theta", "embed_scale", "attention_scale", "attention_soft_cap", "final_soft_cap"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be in [0, 1), got {self.rms_norm_eps}")
        if self.sliding_windows is None:
            return
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows must have one entry for each of the {self.num_layers} layers, got "
                f"{len(self.sliding_windows)}"
            )
        for window in self.sliding_windows:
            if window is not None and not 1 <= window <= _INT32_MAX:
                raise ValueError(f"a sliding window must be at least 1 and at most {_INT32_MAX:,}, got {window}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}")
