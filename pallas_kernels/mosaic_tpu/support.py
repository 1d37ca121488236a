"""What the kernel takes; everything else is refused before anything is traced."""

from typing import Final

from jax import Array

from pallas_kernels.mosaic_tpu import target, work
from pallas_kernels.mosaic_tpu.sizes import choose

VMEM_SHARE: Final = 0.75
"""Of a core's VMEM; the rest is the compiler's."""

SCALAR_BYTES: Final = 768 * 2**10
"""Of the 1 MiB of scalar memory that every chip since v4 has."""

DTYPES: Final = ("float32", "bfloat16")
POOL_DTYPES: Final = (*DTYPES, "int8", "float8_e4m3fn")
HEAD_DIMS: Final = (64, 128, 256)
PAGE_SIZES: Final = (8, 16, 32, 64, 128)
QUANTISED_PAGE_SIZES: Final = (128,)
"""XLA lays kv_scales out row by row only if a page fills the lanes; otherwise every call would copy all of it."""


def check(q: Array, kv_pages: Array, block_tables: Array, *, num_kv_heads: int, max_query_len: int) -> None:
    """Checks arguments that fit together already.

    Raises:
      ValueError: a dtype or a size is none of those supported.
      NotImplementedError: the platform is not.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size = kv_pages.shape[1]
    num_seqs, pages_per_seq = block_tables.shape
    if not target.interpreted() and target.platform() != "tpu":
        raise NotImplementedError(
            _message("the platform", target.platform(), "tpu, or any inside pltpu.force_tpu_interpret_mode()")
        )
    quantised = kv_pages.dtype.itemsize == 1
    for name, got, supported, remedy in (
        ("q's dtype", q.dtype.name, DTYPES, ""),
        ("kv_pages' dtype", kv_pages.dtype.name, POOL_DTYPES, ""),
        ("head_dim", head_dim, HEAD_DIMS, " (pad smaller ones: KVLayout.padded_head_dim)"),
        (
            "page_size",
            page_size,
            QUANTISED_PAGE_SIZES if quantised else PAGE_SIZES,
            " (of a quantised pool)" * quantised,
        ),
    ):
        if got not in supported:
            raise ValueError(_message(name, got, ", ".join(map(str, supported)) + remedy))
    sizes = choose(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        max_query_len=max_query_len, query_dtype=q.dtype, pool_dtype=kv_pages.dtype,
        budget=int(VMEM_SHARE * target.vmem_bytes()),
    )  # fmt: skip
    if sizes is None:
        shape = f"{num_heads} heads, {num_kv_heads} KV heads, head_dim {head_dim}, {q.dtype}"
        raise ValueError(_message("the VMEM needed", f"too much ({shape})", f"{target.vmem_bytes() >> 20} MiB"))
    num_items = work.max_items(num_tokens, num_seqs, sizes.block_q, max_query_len)
    scalar_bytes = 4 * (num_seqs * pages_per_seq + work.NUM_FIELDS * num_items)
    if scalar_bytes > SCALAR_BYTES:
        raise ValueError(
            _message(
                "the scalar memory needed",
                f"{scalar_bytes} bytes (block_tables of {num_seqs} x {pages_per_seq} pages, {num_items} work items)",
                f"{SCALAR_BYTES} bytes; take larger pages, fewer sequences or a narrower table",
            )
        )


def _message(name: str, got: object, supported: str) -> str:
    return f"implementation 'mosaic_tpu': {name} is {got}, supported is {supported}; implementation='xla' takes it"
