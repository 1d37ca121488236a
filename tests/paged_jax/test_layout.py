"""The geometry: sizes, rows, padding, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import NULL_PAGE, KVLayout
from paged_jax.layout import ceil_div


def layout(**fields: object) -> KVLayout:
    return KVLayout(**{"num_layers": 3, "num_pages": 5, "page_size": 4, "num_kv_heads": 2, "head_dim": 6} | fields)


def test_shape_and_bytes() -> None:
    small = layout()
    assert small.pages_shape == (15, 4, 24)
    assert small.bytes_per_token == 3 * 24 * 4
    assert small.bytes_per_page == 4 * small.bytes_per_token
    assert small.pool_bytes == np.prod(small.pages_shape) * 4
    assert small.padding_bytes == 0


def test_padded_heads_are_counted() -> None:
    padded = layout(padded_head_dim=8, dtype=jnp.bfloat16)
    assert padded.pages_shape == (15, 4, 32)
    assert padded.pool_bytes == 15 * 4 * 32 * 2
    assert padded.padding_bytes == 15 * 4 * 2 * 2 * 2 * 2  # rows, slots, heads, K and V, lanes, bytes


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_scales_are_counted(dtype: object) -> None:
    quantised = layout(padded_head_dim=8, dtype=dtype)
    assert quantised.is_quantised
    assert not layout().is_quantised
    assert quantised.pages_shape == (15, 4, 32)
    assert quantised.scales_shape == (15, 4, 4)
    assert quantised.bytes_per_token == 3 * (32 + 4 * 4)
    assert quantised.pool_bytes == 15 * 4 * 32 + 15 * 4 * 4 * 4
    assert quantised.padding_bytes == 15 * 4 * 2 * 2 * 2


def test_padded_head_dim_defaults_to_head_dim_and_dtype_is_canonical() -> None:
    assert layout().padded_head_dim == 6
    assert layout(dtype="float32") == layout(dtype=jnp.float32) == layout(padded_head_dim=6)
    assert hash(layout(dtype="float32")) == hash(layout(dtype=np.float32))
    assert layout() != layout(dtype=jnp.bfloat16)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert layout().pages_for(tokens) == pages
    assert int(ceil_div(jnp.int32(tokens), 4)) == pages


def test_a_page_has_one_row_in_every_layer() -> None:
    rows = [layout().rows_of_page(jnp.int32(page)).tolist() for page in range(5)]
    assert rows[3] == [3, 8, 13]
    assert sorted(row for page in rows for row in page) == list(range(15))
    assert layout().rows_of_page(jnp.int32(1)).dtype == jnp.int32
    assert [layout().row_offset(layer) for layer in range(3)] == [0, 5, 10]


def test_each_head_holds_its_key_and_then_its_value() -> None:
    k, v = layout().split_kv(jnp.arange(48.0, dtype=jnp.float32).reshape(2, 24))
    assert k.shape == v.shape == (2, 2, 6)
    np.testing.assert_array_equal(k[1, :, 0], [24, 36])
    np.testing.assert_array_equal(v[1, :, 0], [30, 42])


def test_each_head_has_a_scale_for_its_key_and_then_one_for_its_value() -> None:
    k, v = layout().split_scales(jnp.arange(16, dtype=jnp.float32).reshape(4, 4))
    np.testing.assert_array_equal(k, [[0, 8], [1, 9], [2, 10], [3, 11]])  # [page_size, num_kv_heads]
    np.testing.assert_array_equal(v, [[4, 12], [5, 13], [6, 14], [7, 15]])


def test_padding_is_zeros_and_split_drops_it() -> None:
    padded = layout(padded_head_dim=8)
    x = jnp.ones((3, 2, 6), jnp.float32)
    wide = padded.pad_heads(x)
    assert wide.shape == (3, 2, 8)
    assert not wide[..., 6:].any()
    k, v = padded.split_kv(jnp.stack([wide, 2 * wide], axis=2).reshape(3, 32))
    np.testing.assert_array_equal(k, x)
    np.testing.assert_array_equal(v, 2 * x)
    assert layout().pad_heads(x) is x


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be at least 1, got -1"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_pages": 1}, "num_pages must be at least 2 .*null page.* got 1"),
        ({"padded_head_dim": 4}, "padded_head_dim must be at least head_dim = 6, got 4"),
        ({"dtype": jnp.int32}, r"dtype must be a floating-point dtype, or quantised \(int8 or float8.*\), got int32"),
        ({"num_pages": 2**28}, r"below 2\*\*31, got 3 \* 268435456 \* 4; take fewer pages"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**fields)


def test_the_largest_pool_that_int32_can_count() -> None:
    assert layout(num_layers=1, num_pages=2**31 - 1, page_size=1).num_pages == 2**31 - 1
    with pytest.raises(ValueError, match="2147483648"):
        layout(num_layers=1, num_pages=2**31, page_size=1)


def test_the_null_page_is_page_0() -> None:
    assert NULL_PAGE == 0
