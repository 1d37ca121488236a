"""How many pages fit."""

import jax
import pytest

import paged_jax as pj
from paged_jax import budget, steps
from tests.paged_jax.tiny import TinyModel, tiny_layout, tiny_params

CONFIG = pj.EngineConfig(max_seqs=4, max_model_len=64, max_tokens_per_step=32)
LAYOUT = tiny_layout()
PAGE = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, KV heads, K and V, head_dim, bytes


def test_cpu_pool_is_what_the_engine_can_use():
    assert LAYOUT.bytes_per_page == PAGE
    layout = pj.size_pool(TinyModel(), tiny_params(), LAYOUT, CONFIG)
    assert layout.num_pages == 4 * 16 + 1
    assert pj.size_pool(TinyModel(), tiny_params(), tiny_layout(num_pages=2), CONFIG) == layout


def test_cpu_pool_is_at_most_a_gibibyte():
    config = pj.EngineConfig(max_seqs=256, max_model_len=100_000, max_tokens_per_step=256)
    assert budget.cpu_pool(LAYOUT, config).num_pages == 2**30 // PAGE


def test_accelerator_pool_is_what_is_left():
    layout = budget.accelerator_pool(LAYOUT, CONFIG, limit=1_000_000, weights=300_000, temporary=100_000)
    assert layout.num_pages == 500_000 // PAGE


def test_too_little_memory_gives_the_numbers():
    with pytest.raises(pj.MemoryBudgetError) as caught:
        budget.accelerator_pool(LAYOUT, CONFIG, limit=50_000, weights=20_000, temporary=10_000)
    message = str(caught.value)
    assert "0.9 (memory_utilization) of 50,000 bytes, less 20,000 for weights and 10,000 for temporaries" in message
    assert f"15,000 bytes hold {15_000 // PAGE} pages of {PAGE:,} bytes" in message
    assert "max_model_len = 64 tokens needs 17" in message
    assert f"largest sequence that would fit has {(15_000 // PAGE - 1) * 4} tokens" in message
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in message


def test_nothing_left():
    with pytest.raises(pj.MemoryBudgetError, match="0 bytes hold 0 pages"):
        budget.accelerator_pool(LAYOUT, CONFIG, limit=50_000, weights=90_000, temporary=0)


def test_a_device_with_a_limit(monkeypatch):
    """The whole path, with a device that reports how much memory it has."""

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 10_000_000}

    class Leaf:
        nbytes = 1_000_000

        def devices(self):
            return {Device()}

    monkeypatch.setattr(steps, "temporary_bytes", lambda *_: 2_000_000)
    layout = budget.size_pool(TinyModel(), [Leaf(), Leaf()], LAYOUT, CONFIG)
    assert layout.num_pages == 5_000_000 // PAGE


@pytest.mark.slow
def test_temporaries_are_those_of_the_largest_step_and_not_the_pool():
    few = steps.temporary_bytes(TinyModel(), tiny_params(), tiny_layout(num_pages=20), CONFIG)
    many = steps.temporary_bytes(TinyModel(), tiny_params(), tiny_layout(num_pages=2000), CONFIG)
    assert few == many
    assert few < 2000 * PAGE
    wide = pj.EngineConfig(max_seqs=4, max_model_len=64, max_tokens_per_step=256)
    assert steps.temporary_bytes(TinyModel(), tiny_params(), tiny_layout(num_pages=20), wide) > few


def test_missing_cpu_backend(monkeypatch):
    def unavailable(*args, **kwargs):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", unavailable)
    with pytest.raises(pj.MissingBackendError, match="JAX_PLATFORMS=cuda,cpu"):
        pj.Engine(TinyModel(), tiny_params(), LAYOUT)
