"""Rotary position embeddings (Su et al. 2021), in the half-split order of Hugging Face checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from models.config import LinearRopeScaling, Llama3RopeScaling, TransformerConfig


def inverse_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians a position of each pair of dimensions: float32 [head_dim / 2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponent
    match config.rope_scaling:
        case LinearRopeScaling(factor):
            frequencies = frequencies / factor
        case Llama3RopeScaling():
            frequencies = _scale_llama3(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def cos_sin(
    positions: Int32[Array, " num_tokens"], inv_freq: np.ndarray
) -> tuple[Float[Array, "num_tokens half"], Float[Array, "num_tokens half"]]:
    """Cosine and sine of every token's angles: float32 [num_tokens, head_dim / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "num_tokens heads head_dim"],
    cos: Float[Array, "num_tokens half"],
    sin: Float[Array, "num_tokens half"],
) -> Float[Array, "num_tokens heads head_dim"]:
    """Turns dimension i together with dimension i + head_dim / 2 by the token's i-th angle, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
