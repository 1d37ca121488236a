"""The floor of small loads, counted by hand."""

import jax.numpy as jnp
import pytest

from models.config import TransformerConfig
from scripts.benchmarks.floor import Chunk, Floor, Rates

CONFIG = TransformerConfig(
    vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2,
    max_model_len=64,
)  # fmt: skip
LAYER = 4 * (4 + 2 + 2 + 4) + 3 * 4 * 6  # q, k, v, o; gate, up, down
WEIGHTS = 2 * LAYER + 40


def least(config=CONFIG, *, by_bytes=1.0, by_operations=1.0):
    return Floor(config, jnp.float32, Rates(by_bytes, by_operations))


@pytest.mark.parametrize(
    ("chunks", "shared", "keys_moved", "keys_seen"),
    [
        ([Chunk(5)], 0, 5 + 1, 6),
        ([Chunk(5), Chunk(0)], 0, 5 + 2, 6 + 1),
        ([Chunk(5), Chunk(7)], 4, 4 + 1 + 3 + 2, 6 + 8),
        ([Chunk(2, 3)], 0, 2 + 3, 3 + 4 + 5),
    ],
)
def test_step(chunks, shared, keys_moved, keys_seen):
    tokens = sum(chunk.computed for chunk in chunks)
    moved = 4 * (WEIGHTS + 2 * keys_moved * (2 + 2))
    computed = 2 * (2 * LAYER * tokens + 40 * len(chunks)) + 2 * keys_seen * 2 * (2 * 2 + 2 * 2)
    assert least(by_operations=float("inf")).step(chunks, shared) == moved
    assert least(by_bytes=float("inf")).step(chunks, shared) == computed
    assert least().step(chunks, shared) == max(moved, computed)


def test_a_window_of_one_layer_bounds_its_keys():
    windowed = least(TransformerConfig(**{**vars(CONFIG), "sliding_windows": (3, None)}), by_operations=float("inf"))
    assert windowed.step([Chunk(9)]) == 4 * (WEIGHTS + 4 * (2 + 1 + 9 + 1))


def test_load_is_a_step_of_all_prompts_and_one_for_every_further_token():
    """Of equal prompts the last token is computed for each: somebody needs its logits."""
    floor = least(by_operations=float("inf"))
    expected = floor.step([Chunk(0, 3), Chunk(2, 1)], 2)
    expected += floor.step([Chunk(3), Chunk(3)], 2) + floor.step([Chunk(4)])
    assert floor.load([([7, 8, 9], 3), ([7, 8, 9], 2)]) == expected
    assert floor.load([([7, 8, 9], 1)]) == floor.step([Chunk(0, 3)])
