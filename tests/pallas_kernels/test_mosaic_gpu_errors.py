"""What the Mosaic GPU kernels refuse, before tracing and by name; what is chosen when nothing is named."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import default_implementation, paged_attention
from pallas_kernels.mosaic_gpu import check, target

unchecked: Any = inspect.unwrap(check)  # shapes stand for arrays here; the tests' type checker wants arrays

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
INT8, FP8 = jnp.int8, jnp.float8_e4m3fn


def arguments(
    dtype: Any = BF16, q_dtype: Any = None, head_dim: int = 64, page_size: int = 16, heads: tuple[int, int] = (4, 2)
) -> dict[str, Any]:
    return {
        "q": jax.ShapeDtypeStruct((3, heads[0], head_dim), q_dtype or dtype),
        "kv_pages": jax.ShapeDtypeStruct((6, page_size, heads[1] * 2 * head_dim), dtype),
        "block_tables": jax.ShapeDtypeStruct((2, 3), jnp.int32),
        "num_kv_heads": heads[1],
        "max_query_len": 2,
    }


def checked(**changes: Any) -> None:
    a = arguments(**changes)
    unchecked(a.pop("q"), a.pop("kv_pages"), a.pop("block_tables"), **a)


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "float32 pool": ({"dtype": F32}, ("q's dtype is float32", "bfloat16 or float16", "'xla'")),
    "float32 queries": ({"q_dtype": F32}, ("q's dtype is float32", "bfloat16 or float16", "'xla'")),
    "other dtypes": ({"q_dtype": F16}, ("kv_pages' dtype is bfloat16", "q's, float16 or int8 or float8_e4m3fn")),
    "float32 queries of a quantised pool": ({"dtype": INT8, "q_dtype": F32}, ("q's dtype is float32", "'xla'")),
    "head_dim": ({"head_dim": 80}, ("head_dim is 80", "64, 128, 256", "padded_head_dim", "'xla'")),
    "page_size": ({"page_size": 4}, ("page_size is 4", "8, 16, 32, 64, 128", "'xla'")),
    "group": ({"heads": (17, 1)}, ("num_heads / num_kv_heads is 17", "1 to 16", "'xla'")),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_and_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "capability", lambda: (9, 0))
    changes, words = WRONG[name]
    with pytest.raises(ValueError) as error:
        checked(**changes)
    assert [word for word in ("mosaic_gpu", *words) if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("capability", "changes", "words"),
    [
        (None, {}, ("the platform is 'cpu'", "sm_80, sm_89, sm_90, sm_100, sm_120")),
        ((7, 5), {}, ("the chip is sm_75", "sm_80, sm_89, sm_90, sm_100, sm_120")),
        ((8, 9), {"head_dim": 256}, ("head_dim is 256 on sm_89", "64, 128")),
        ((12, 0), {"head_dim": 256}, ("head_dim is 256 on sm_120", "64, 128")),
        ((8, 0), {"page_size": 8}, ("page_size is 8 on sm_80", "16 and more there with bfloat16 and head_dim 64")),
        ((8, 0), {"dtype": INT8, "q_dtype": BF16}, ("kv_pages' dtype is int8 on sm_80", "sm_90, sm_100")),
        ((12, 0), {"dtype": FP8, "q_dtype": BF16}, ("float8_e4m3fn on sm_120", "sm_90, sm_100")),
    ],
)
def test_platforms_and_chips(
    capability: tuple[int, int] | None, changes: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "capability", lambda: capability)
    with pytest.raises(NotImplementedError) as error:
        checked(**changes)
    assert [word for word in ("mosaic_gpu", "'xla'", *words) if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_what_is_supported_passes(head_dim: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "capability", lambda: (9, 0))
    for q_dtype in (BF16, F16):
        for dtype in (q_dtype, INT8, FP8):
            for group in range(1, 17):
                checked(dtype=dtype, q_dtype=q_dtype, head_dim=head_dim, page_size=page_size, heads=(group, 1))


def attend(implementation: str | None) -> jax.Array:
    return paged_attention(
        jnp.ones((2, 4, 8)), jnp.ones((6, 2, 32)), jnp.ones((2, 3), jnp.int32), jnp.array([4, 2], jnp.int32),
        jnp.array([0, 1, 2], jnp.int32), row_offset=0, num_kv_heads=2, scale=1.0, max_query_len=1,
        implementation=implementation,
    )  # fmt: skip


def test_a_named_implementation_is_never_replaced() -> None:
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        attend("mosaic_gpu")


def test_a_gpu_defaults_to_the_kernels_where_they_take_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(target, "capability", lambda: (9, 0))
    assert default_implementation() == "mosaic_gpu"
    assert (attend(None) == 1).all()  # float32 and head_dim 8: xla
    with pytest.raises(ValueError, match="mosaic_gpu"):
        attend("mosaic_gpu")
