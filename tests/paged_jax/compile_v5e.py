"""Compiles a model's decode step for four v5e chips that are not here; test_sharding.py runs this.

The argument is the attention implementation; needs libtpu.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax as pj
from models.config import TransformerConfig
from models.transformer import functional, random_params
from paged_jax import sharding
from tests.paged_jax.collectives import collectives, moved_pages

CONFIG = TransformerConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=512, num_layers=2, num_heads=32, num_kv_heads=8, head_dim=128,
    max_model_len=1024,
)  # fmt: skip
MAX_SEQS, PAGE_SIZE, NUM_PAGES = 8, 16, 20_011


def compile_step(implementation: str) -> None:
    """Raises AssertionError if a page leaves its chip or the pool is copied."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(chips), ("heads",))
    model = functional(CONFIG, attention=sharding.attention(mesh, "heads"), unroll_layers=True)
    layout = model.kv_layout(num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.bfloat16)

    def step(params, cache, token_ids):
        cache, batch, _ = pj.append_decode(cache, jnp.ones(MAX_SEQS, bool))
        hidden, kv = model(params, token_ids, replace(batch, implementation=implementation), cache.kv)
        return replace(cache, kv=kv), model.logits(params, hidden)

    def everywhere(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), tree)

    cache = jax.eval_shape(partial(pj.PagedCache.create, layout, max_seqs=MAX_SEQS, pages_per_seq=1024 // PAGE_SIZE))
    kv = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        cache.kv, sharding.shardings(layout, mesh, "heads"),
    )  # fmt: skip
    params = everywhere(jax.eval_shape(partial(random_params, CONFIG, dtype=jnp.bfloat16)))
    arguments = params, replace(everywhere(cache), kv=kv), everywhere(jax.ShapeDtypeStruct((MAX_SEQS,), jnp.int32))
    program = jax.jit(step, donate_argnums=1).lower(*arguments).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert implementation == "xla" or "tpu_custom_call" in text
    assert collectives(text), "a model whose weights are everywhere gathers at least the heads' outputs"
    moved = moved_pages(text, CONFIG.num_layers * NUM_PAGES)
    assert not moved, moved
    share = layout.pool_bytes // 4
    assert memory.alias_size_in_bytes >= share, f"the donated pages are not the result's: {memory}"
    assert memory.temp_size_in_bytes < share / 20, f"{memory.temp_size_in_bytes} bytes beside {share} of pages"


if __name__ == "__main__":
    compile_step(sys.argv[1])
