"""The static description of a transformer: what a checkpoint's metadata says about its shapes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 ("rope_type": "llama3" in config.json; see `models.rope`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes and constants of a decoder of the Llama family (Llama, SmolLM2).

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
    rope_scaling: Llama3RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        positive = (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers",
            "num_heads", "num_kv_heads", "head_dim", "max_model_len",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
