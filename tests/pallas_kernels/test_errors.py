"""Messages of wrong arguments; differentiation is refused."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from pallas_kernels import IMPLEMENTATIONS, paged_attention, write_kv
from scripts.kernels.cases import CONTRACT

# The tests' type checker sees wrong ranks and dtypes before the function does; users have no checker.
unchecked_attention: Callable[..., Any] = inspect.unwrap(paged_attention)
unchecked_write: Callable[..., Any] = inspect.unwrap(write_kv)

INT, F32 = jnp.int32, jnp.float32


def attention_arguments() -> dict[str, Any]:
    return {
        "q": jnp.ones((3, 4, 8), F32),
        "kv_pages": jnp.ones((6, 2, 2 * 2 * 8), F32),
        "block_tables": jnp.ones((2, 3), jnp.int32),
        "seq_lens": jnp.array([4, 2], jnp.int32),
        "cu_query_lens": jnp.array([0, 1, 3], jnp.int32),
        "row_offset": 0,
        "num_kv_heads": 2,
        "scale": 1.0,
        "max_query_len": 2,
    }


def write_arguments() -> dict[str, Any]:
    return {
        "kv_pages": jnp.ones((6, 2, 2 * 2 * 8), F32),
        "k": jnp.ones((3, 2, 8), F32),
        "v": jnp.ones((3, 2, 8), F32),
        "slot_mapping": jnp.array([2, 3, -1], jnp.int32),
        "row_offset": 0,
    }


INT8_POOL = jnp.ones((6, 2, 32), jnp.int8)
SCALES_ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no scales": ({"kv_pages": INT8_POOL}, ("kv_scales must be given", "int8", "None")),
    "scales of float pages": ({"kv_scales": jnp.ones((6, 4, 2), F32)}, ("kv_scales must be None", "float32")),
    "shape of scales": (
        {"kv_pages": INT8_POOL, "kv_scales": jnp.ones((6, 2, 4), F32)},
        ("kv_scales must be float32", "[rows, num_kv_heads * 2, page_size] = [6, 4, 2]", "[6, 2, 4]"),
    ),
    "dtype of scales": (
        {"kv_pages": INT8_POOL, "kv_scales": jnp.ones((6, 4, 2), jnp.bfloat16)},
        ("kv_scales must be float32", "bfloat16"),
    ),
}
ATTENTION_ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rank of q": ({"q": jnp.ones((3, 32), F32)}, ("q ", "3 axes", "[num_tokens, num_heads, head_dim]", "[3, 32]")),
    "rank of pool": ({"kv_pages": jnp.ones((6, 64), F32)}, ("kv_pages ", "3 axes", "page_size", "[6, 64]")),
    "rank of tables": ({"block_tables": jnp.ones((6,), INT)}, ("block_tables ", "2 axes", "pages_per_seq", "[6]")),
    "rank of lengths": ({"seq_lens": jnp.ones((2, 1), INT)}, ("seq_lens ", "1 axes", "[num_seqs]", "[2, 1]")),
    "rank of queries": ({"cu_query_lens": jnp.ones((3, 1), INT)}, ("cu_query_lens ", "1 axes", "[3, 1]")),
    "no KV heads": ({"num_kv_heads": 0}, ("num_kv_heads ", "divide", "num_heads = 4", "got 0")),
    "negative KV heads": ({"num_kv_heads": -2}, ("num_kv_heads ", "divide", "got -2")),
    "KV heads that do not divide": ({"num_kv_heads": 3}, ("num_kv_heads ", "divide", "num_heads = 4", "got 3")),
    "lanes": ({"kv_pages": jnp.ones((6, 2, 16), F32)}, ("kv_pages' last axis", "2 * 2 * 8 = 32", "got 16")),
    "lanes of other heads": ({"num_kv_heads": 4}, ("kv_pages' last axis", "4 * 2 * 8 = 64", "got 32")),
    "fewer lengths": ({"seq_lens": jnp.ones(1, INT)}, ("seq_lens ", "[2]", "block_tables", "got [1]")),
    "fewer queries": ({"cu_query_lens": jnp.ones(2, INT)}, ("cu_query_lens ", "[3]", "num_seqs + 1", "got [2]")),
    "dtype of tables": ({"block_tables": jnp.ones((2, 3), F32)}, ("block_tables ", "int32", "float32", "astype")),
    "dtype of lengths": ({"seq_lens": jnp.ones(2, jnp.int16)}, ("seq_lens ", "int32", "int16", "astype")),
    "dtype of queries": ({"cu_query_lens": jnp.ones(3, jnp.uint32)}, ("cu_query_lens ", "int32", "uint32")),
    "dtype of q": ({"q": jnp.ones((3, 4, 8), INT)}, ("q ", "floating-point", "int32")),
    "dtype of pool": ({"kv_pages": jnp.ones((6, 2, 32), INT)}, ("kv_pages ", "floating-point", "int8", "int32")),
    **{f"{name} (quantised pool)": error for name, error in SCALES_ERRORS.items()},
    "no query": ({"max_query_len": 0}, ("max_query_len ", "at least 1", "got 0")),
    "empty window": ({"sliding_window": 0}, ("sliding_window ", "at least 1", "None", "got 0")),
    "zero cap": ({"logit_soft_cap": 0.0}, ("logit_soft_cap ", "above 0", "None", "got 0.0")),
    "cap that is no number": ({"logit_soft_cap": float("nan")}, ("logit_soft_cap ", "above 0", "got nan")),
    "implementation": ({"implementation": "cuda"}, ("implementation ", *map(repr, IMPLEMENTATIONS), "None", "'cuda'")),
}
WRITE_ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rank of k": ({"k": jnp.ones((3, 16), F32)}, ("k ", "3 axes", "[num_tokens, num_kv_heads, head_dim]", "[3, 16]")),
    "shape of v": ({"v": jnp.ones((3, 2, 4), F32)}, ("v ", "k's shape [3, 2, 8]", "got [3, 2, 4]")),
    "rank of pool": ({"kv_pages": jnp.ones((12, 32), F32)}, ("kv_pages ", "3 axes", "[12, 32]")),
    "lanes": ({"kv_pages": jnp.ones((6, 2, 16), F32)}, ("kv_pages' last axis", "2 * 2 * 8 = 32", "got 16")),
    "fewer slots": ({"slot_mapping": jnp.ones(2, INT)}, ("slot_mapping ", "[3]", "got [2]")),
    "rank of slots": ({"slot_mapping": jnp.ones((3, 1), INT)}, ("slot_mapping ", "[3]", "got [3, 1]")),
    "dtype of slots": ({"slot_mapping": jnp.ones(3, F32)}, ("slot_mapping ", "int32", "float32", "astype")),
    "dtype of k": ({"k": jnp.ones((3, 2, 8), INT)}, ("k ", "floating-point", "int32")),
    "dtype of v": ({"v": jnp.ones((3, 2, 8), INT)}, ("v ", "floating-point", "int32")),
    "dtype of pool": ({"kv_pages": jnp.ones((6, 2, 32), INT)}, ("kv_pages ", "floating-point", "int8", "int32")),
    **{f"{name} (quantised pool)": error for name, error in SCALES_ERRORS.items()},
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ATTENTION_ERRORS)
def test_attention_names_what_is_wrong(name: str, jit: bool) -> None:
    changes, words = ATTENTION_ERRORS[name]
    arguments = attention_arguments() | changes
    q = arguments.pop("q")

    def call(q: Array) -> Any:
        return unchecked_attention(q, **arguments)

    with pytest.raises(ValueError) as error:
        (jax.jit(call) if jit else call)(q)
    assert_words(str(error.value), words)


@pytest.mark.parametrize("name", WRITE_ERRORS)
def test_write_names_what_is_wrong(name: str) -> None:
    changes, words = WRITE_ERRORS[name]
    with pytest.raises(ValueError) as error:
        unchecked_write(**(write_arguments() | changes))
    assert_words(str(error.value), words)


def assert_words(message: str, words: tuple[str, ...]) -> None:
    assert message.startswith(words[0]), message
    assert [word for word in words if word not in message] == [], message


def test_the_arguments_of_these_tests_are_right() -> None:
    assert unchecked_attention(**attention_arguments()).shape == (3, 4, 8)
    assert unchecked_write(**write_arguments()).shape == (6, 2, 32)
    quantised = {"kv_pages": INT8_POOL, "kv_scales": jnp.ones((6, 4, 2), F32)}
    assert unchecked_attention(**(attention_arguments() | quantised)).shape == (3, 4, 8)
    pages, scales = unchecked_write(**(write_arguments() | quantised))
    assert (pages.shape, pages.dtype, scales.shape) == ((6, 2, 32), jnp.int8, (6, 4, 2))


def by_grad(f: Callable[[Array], Array], x: Array) -> Any:
    return jax.grad(f)(x)


def by_jvp(f: Callable[[Array], Array], x: Array) -> Any:
    return jax.jvp(f, (x,), (x,))


def by_vjp(f: Callable[[Array], Array], x: Array) -> Any:
    return jax.vjp(f, x)


def by_jit_of_grad(f: Callable[[Array], Array], x: Array) -> Any:
    return jax.jit(jax.grad(f))(x)


def by_grad_of_jit(f: Callable[[Array], Array], x: Array) -> Any:
    return jax.grad(jax.jit(f))(x)


def by_grad_of_scan(f: Callable[[Array], Array], x: Array) -> Any:
    def loss(x: Array) -> Array:
        return jax.lax.scan(lambda total, _: (total + f(x), None), jnp.float32(0.0), length=2)[0]

    return jax.grad(loss)(x)


@pytest.mark.parametrize("name", ["q", "kv_pages", "scale"])
@pytest.mark.parametrize("how", [by_grad, by_jvp, by_vjp, by_jit_of_grad, by_grad_of_jit, by_grad_of_scan])
def test_differentiation_is_refused(how: Callable[..., Any], name: str) -> None:
    arguments = attention_arguments()
    x = jnp.asarray(arguments.pop(name), jnp.float32)
    with pytest.raises(NotImplementedError) as error:
        how(lambda x: paged_attention(**arguments, **{name: x}).sum(), x)
    assert_words(str(error.value), ("paged_attention", "inference", "no derivative", "dot_product_attention"))


@pytest.mark.parametrize("implementation", CONTRACT)
def test_differentiation_is_refused_by_every_implementation(implementation: str) -> None:
    arguments = attention_arguments()
    q = arguments.pop("q")
    with pytest.raises(NotImplementedError) as error:
        jax.grad(lambda q: paged_attention(q, **arguments, return_lse=True, implementation=implementation)[1].sum())(q)
    assert_words(str(error.value), ("paged_attention", "inference"))


def test_constant_attention_may_sit_in_a_differentiated_function() -> None:
    """Nothing is differentiated through it, so nothing is refused."""
    out = paged_attention(**attention_arguments())
    gradient = jax.grad(lambda x: (x * paged_attention(**attention_arguments())).sum())(jnp.ones_like(out))
    assert (gradient == out).all()
