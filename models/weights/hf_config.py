"""Reads a Hugging Face folder's config.json, as transformers 4 or 5 writes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.config import MAX_LAYERS, LinearRopeScaling, Llama3RopeScaling, TransformerConfig
from models.fields import Fields, shown


@dataclass(frozen=True)
class _Architecture:
    """What a model type is, beyond what its config.json says.

    Attributes:
      class_name: the class in config.json's "architectures".
      only: fields that must have one value, because another is not implemented.
      defaults: values of fields that a config.json may leave out, where transformers does not take Llama's.
      windowed: for (fields, layer) whether the layer has the sliding window, where "layer_types" does not say so.
      constants: the `TransformerConfig` arguments that only this type has.
    """

    class_name: str
    only: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windowed: Callable[[Fields, int], bool] | None = None
    constants: Callable[[Fields], dict[str, Any]] = lambda fields: {}


def _qwen_windowed(fields: Fields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.integer("max_window_layers")


def _gemma2_constants(fields: Fields) -> dict[str, Any]:
    def cap(name: str) -> float | None:
        return None if fields.get(name) is None else fields.number(name)

    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": _power("hidden_size", 0.5, fields),
        "attention_scale": _power("query_pre_attn_scalar", -0.5, fields),
        "attention_soft_cap": cap("attn_logit_softcapping"),
        "final_soft_cap": cap("final_logit_softcapping"),
    }


def _power(name: str, exponent: float, fields: Fields) -> float:
    value = fields.number(name)
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return float(value**exponent)


_SILU = {"hidden_act": "silu"}
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", only={**_SILU, "attention_bias": False, "mlp_bias": False}),
    "mistral": _Architecture(
        "MistralForCausalLM",
        only={**_SILU, "layer_types": None},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windowed=lambda fields, layer: True,
    ),
    "qwen2": _Architecture(
        "Qwen2ForCausalLM",
        only=_SILU,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        windowed=_qwen_windowed,
        constants=lambda fields: {"qkv_bias": True},
    ),
    "qwen3": _Architecture(
        "Qwen3ForCausalLM",
        only={**_SILU, "attention_bias": False},
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        windowed=_qwen_windowed,
        constants=lambda fields: {"qk_norm": True},
    ),
    "gemma2": _Architecture(
        "Gemma2ForCausalLM",
        only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False},
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windowed=lambda fields, layer: layer % 2 == 0,
        constants=_gemma2_constants,
    ),
}


def read_config(folder: Path) -> TransformerConfig:
    """The model's shapes and constants.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is not JSON, the architecture or a field is not supported, or a field is missing or senseless.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a Hugging Face model folder")
    fields = Fields.read(path)
    try:
        return _config(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _config(fields: Fields) -> TransformerConfig:
    architecture = _architecture(fields)
    fields = Fields({**architecture.defaults, **fields.values})
    _check_only(architecture, fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    theta, scaling = _rope(fields)
    return TransformerConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        max_model_len=fields.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),  # 1e-6: what transformers assumes
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        sliding_windows=_sliding_windows(architecture, fields, num_layers),
        **architecture.constants(fields),
    )


def _architecture(fields: Fields) -> _Architecture:
    model_type, names = fields.get("model_type"), fields.get("architectures")
    architecture = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None or names not in (None, [], [architecture.class_name]):
        supported = ", ".join(f"{known.class_name} ({name})" for name, known in _ARCHITECTURES.items())
        named = ", ".join(map(str, names)) if isinstance(names, list) else names
        raise ValueError(f"architecture {named} (model_type {model_type!r}) is not supported; supported: {supported}")
    return architecture


def _check_only(architecture: _Architecture, fields: Fields) -> None:
    only: dict[str, Any] = {**architecture.only, "partial_rotary_factor": 1.0, "quantization_config": None}
    for name, allowed in only.items():
        value = fields.get(name)
        if value is not None and value != allowed:
            raise ValueError(f"{name} = {shown(value)} is not supported; it must be {allowed!r} or absent")


def _sliding_windows(architecture: _Architecture, fields: Fields, num_layers: int) -> tuple[int | None, ...] | None:
    if architecture.windowed is None or num_layers > MAX_LAYERS:
        return None
    types = fields.get("layer_types")
    if types is None:
        windowed = [architecture.windowed(fields, layer) for layer in range(num_layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            raise ValueError(f"layer_types must name {' or '.join(known)} for each of the {num_layers} layers")
        windowed = [kind == "sliding_attention" for kind in types]
        if any(windowed):
            fields.integer("sliding_window")
    if not any(windowed) or fields.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    return tuple(window if has_window else None for has_window in windowed)


def _rope(fields: Fields) -> tuple[float, LinearRopeScaling | Llama3RopeScaling | None]:
    """Base and scaling; "rope_parameters" (transformers 5) holds both, "rope_scaling" only the latter."""
    where = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.nested(where)

    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise ValueError(f"{name} is not supported; the rotary embedding must be the same in all layers")
    partial = f"{where}.partial_rotary_factor"
    if rope.number(partial, 1.0) != 1.0:
        raise ValueError(f"{partial} = {rope.number(partial)} is not supported; it must be 1.0 or absent")
    theta = rope.number(f"{where}.rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text(f"{where}.rope_type") or rope.text(f"{where}.type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(rope.number(f"{where}.factor"))
    if kind == "llama3":
        factor, low, high = (
            rope.number(f"{where}.{name}") for name in ("factor", "low_freq_factor", "high_freq_factor")
        )
        original = rope.integer(f"{where}.original_max_position_embeddings")
        return theta, Llama3RopeScaling(factor, low, high, original)
    raise ValueError(f"{where}.rope_type = {kind!r} is not supported; supported: 'default', 'linear', 'llama3'")
