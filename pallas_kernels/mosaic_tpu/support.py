"""What the kernel takes; everything else is refused before anything is traced."""

from collections.abc import Sequence
from typing import Any, Final

from jax import Array

from pallas_kernels.mosaic_tpu import target, work
from pallas_kernels.mosaic_tpu.sizes import choose

VMEM_SHARE: Final = 0.75
"""Of a core's VMEM; the rest is the compiler's."""

SCALAR_BYTES: Final = 768 * 2**10
"""Of the 1 MiB of scalar memory that every chip since v4 has."""

DTYPES: Final = ("float32", "bfloat16")
HEAD_DIMS: Final = (64, 128, 256)
PAGE_SIZES: Final = (8, 16, 32, 64, 128)


def check(
    q: Array, kv_pages: Array, block_tables: Array, kv_scales: Array | None, *, num_kv_heads: int, max_query_len: int
) -> None:
    """Checks arguments that fit together already, of any platform.

    Raises:
      NotImplementedError: the kernel does not take one of them, or does not run on the platform.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size = kv_pages.shape[1]
    num_seqs, pages_per_seq = block_tables.shape
    if not target.interpreted():
        _check(
            "the platform", target.platform(), ("tpu",), "; for tests pltpu.force_tpu_interpret_mode() runs it anywhere"
        )
    if kv_scales is not None:
        raise NotImplementedError(f"{_NAME} does not take kv_scales (quantised pools) yet; {_OTHERS}")
    _check("q's dtype", str(q.dtype), DTYPES)
    _check("kv_pages' dtype", str(kv_pages.dtype), DTYPES)
    _check("head_dim", head_dim, HEAD_DIMS, " (KVLayout's padded_head_dim stores a smaller head in a wider one)")
    _check("page_size", page_size, PAGE_SIZES)
    sizes = choose(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        max_query_len=max_query_len, query_dtype=q.dtype, pool_dtype=kv_pages.dtype,
        budget=int(VMEM_SHARE * target.vmem_bytes()),
    )  # fmt: skip
    if sizes is None:
        raise NotImplementedError(
            f"{_NAME} needs more VMEM for {num_heads} heads, {num_kv_heads} KV heads, head_dim {head_dim} in "
            f"{q.dtype} than the {target.vmem_bytes() >> 20} MiB of this chip; {_OTHERS}"
        )
    num_items = work.max_items(num_tokens, num_seqs, sizes.block_q, max_query_len)
    scalar_bytes = 4 * (num_seqs * pages_per_seq + work.NUM_FIELDS * num_items)
    if scalar_bytes > SCALAR_BYTES:
        raise NotImplementedError(
            f"{_NAME} keeps block_tables and its work list in scalar memory: {num_seqs} sequences x {pages_per_seq} "
            f"pages and {num_items} items are {scalar_bytes} bytes, at most {SCALAR_BYTES} are supported; take larger "
            f"pages, fewer sequences or a narrower table; {_OTHERS}"
        )


_NAME: Final = "implementation 'mosaic_tpu'"
_OTHERS: Final = "implementation='xla' takes it"


def _check(name: str, got: Any, supported: Sequence[Any], hint: str = "") -> None:
    if got not in supported:
        allowed = ", ".join(map(str, supported))
        raise NotImplementedError(f"{_NAME} does not take {name} {got}, only {allowed}{hint}; {_OTHERS}")
