"""KV heads over devices: each device holds all pages of its KV heads, writes them and attends to them alone.

Attention of one KV head needs nothing of another, so no page ever crosses devices; block tables, lengths and the
allocator's state are the same everywhere. What a model does between its attention layers is its own business: under
jit, XLA distributes it as the parameters are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.attention import Layer, attend, write_kv
from paged_jax.batch import Batch
from paged_jax.cache import KVPages
from paged_jax.layout import KVLayout


def shardings(layout: KVLayout, mesh: Mesh | AbstractMesh, axis: str) -> KVPages:
    """Where pages and scales go, as a `KVPages` of shardings: for `jax.device_put`, or `out_shardings` of `jax.jit`.

    Args:
      layout: geometry of the whole cache.
      mesh: the devices.
      axis: the mesh axis over which the KV heads are spread.

    Raises:
      ValueError: the KV heads do not fill the devices along `axis` evenly, or the mesh has no such axis.
    """
    _check(layout.num_kv_heads, mesh, axis)
    placed: KVPages = jax.tree.map(partial(NamedSharding, mesh), _specs(layout, axis))
    return placed


def create(layout: KVLayout, mesh: Mesh, axis: str) -> KVPages:
    """Zeroed pages over the devices, none of which holds more than its share at any time.

    Raises:
      ValueError: see `shardings`.
    """
    return jax.jit(partial(KVPages.create, layout), out_shardings=shardings(layout, mesh, axis))()


def attention(mesh: Mesh | AbstractMesh, axis: str) -> Callable[..., tuple[Array, KVPages]]:
    """`write_kv` and then `attend`, each device for its own KV heads.

    Args:
      mesh: the devices. Unless its axis is of the type Auto, q, k and v must come sharded over their heads.
      axis: the mesh axis over which the KV heads are spread.

    Returns:
      A function `(q, k, v, kv, batch, *, layer, **options) -> (out, kv)` with the arguments of `paged_jax.write_kv`
      and `paged_jax.attend`: q [num_tokens, num_heads, head_dim] and k, v [num_tokens, num_kv_heads, head_dim] of all
      heads, sharded over heads or to be sharded; out like q. It is the `attention` that `models.transformer` takes.
      It raises ValueError unless the KV heads fill the devices along `axis` evenly.
    """

    def attend_sharded(
        q: Array, k: Array, v: Array, kv: KVPages, batch: Batch, *, layer: Layer, **options: Any
    ) -> tuple[Array, KVPages]:
        _check(kv.layout.num_kv_heads, mesh, axis)

        def on_one_device(q: Array, k: Array, v: Array, kv: KVPages, batch: Batch) -> tuple[Array, KVPages]:
            kv = write_kv(kv, k, v, batch, layer=layer)
            return attend(q, kv, batch, layer=layer, **options), kv

        heads, pages = P(None, axis), _specs(kv.layout, axis)
        return jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(heads, heads, heads, pages, P()),
            out_specs=(heads, pages),
            check_vma=False,  # the loops inside begin with constants, which no mesh axis varies
        )(q, k, v, kv, batch)

    return attend_sharded


def _specs(layout: KVLayout, axis: str) -> Any:
    """A KVPages of partition specs."""
    spread: Callable[..., Any] = KVPages
    return spread(P(None, None, axis), layout, P(None, axis) if layout.is_quantised else None)


def _check(num_kv_heads: int, mesh: Mesh | AbstractMesh, axis: str) -> None:
    if axis not in mesh.shape:
        raise ValueError(f"axis must be one of the mesh's {tuple(mesh.shape)}, got {axis!r}")
    if num_kv_heads % mesh.shape[axis]:
        possible = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
        raise ValueError(
            f"num_kv_heads must be a multiple of the devices along {axis!r}, since each holds whole KV heads, got "
            f"{num_kv_heads} KV heads on {mesh.shape[axis]} devices; take {' or '.join(map(str, possible))} of them"
        )
