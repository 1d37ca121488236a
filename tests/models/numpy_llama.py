"""An independent decoder of the Llama family in NumPy float64: one sequence, no cache, plain loops over the layers."""

import math

import numpy as np


def forward(config, params, token_ids):
    """Logits float64 [num_tokens, vocab_size] of one sequence."""
    params = _as_float64(params)
    x = params["embed"][np.asarray(token_ids)]
    num_tokens = len(token_ids)
    angles = np.outer(np.arange(num_tokens), _frequencies(config))
    for layer in params["layers"]:
        normed = _rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
        q, k, v = (
            (normed @ layer[name].T).reshape(num_tokens, -1, config.head_dim).swapaxes(0, 1) for name in ("q", "k", "v")
        )
        q, k = _rotate(q, angles), _rotate(k, angles)
        group = config.num_heads // config.num_kv_heads
        attended = np.empty_like(q)
        for head in range(config.num_heads):
            logits = q[head] @ k[head // group].T / math.sqrt(config.head_dim)
            logits[np.triu_indices(num_tokens, 1)] = -np.inf
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            attended[head] = weights / weights.sum(-1, keepdims=True) @ v[head // group]
        x = x + attended.swapaxes(0, 1).reshape(num_tokens, -1) @ layer["o"].T
        normed = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        gate = normed @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"].T)) @ layer["down"].T
    head = params.get("head", params["embed"])
    return _rms_norm(x, params["final_norm"], config.rms_norm_eps) @ head.T


def _as_float64(tree):
    if isinstance(tree, dict):
        return {key: _as_float64(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_float64(value) for value in tree]
    return np.asarray(tree).astype(np.float64)


def _rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _rotate(x, angles):
    """Complex form: dimension i is the real, i + head_dim / 2 the imaginary part."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _frequencies(config):
    """By the rule that Meta published with Llama 3.1, one frequency at a time."""
    out = []
    scaling = config.rope_scaling
    for i in range(config.head_dim // 2):
        freq = config.rope_theta ** (-2 * i / config.head_dim)
        if scaling is not None:
            wavelength = 2 * math.pi / freq
            if wavelength > scaling.original_max_position_embeddings / scaling.low_freq_factor:
                freq /= scaling.factor
            elif wavelength >= scaling.original_max_position_embeddings / scaling.high_freq_factor:
                smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                freq = (1 - smooth) * freq / scaling.factor + smooth * freq
        out.append(freq)
    return np.array(out)
