"""The paged KV cache for JAX: page pools and block tables as immutable arrays, moved by pure functions.

The core (works inside your own jit, scan and while_loop):
    KVLayout, PagedCache, append, append_decode, fork, reorder, truncate, release, copy_pages, gather_kv, usage,
    write_kv, attend, Batch; one level below, the modules `page_pool` and `block_tables`; over devices, `sharding`.
The engine (generates for many requests out of one pool):
    Engine, EngineConfig, Model (what it asks of a model), Request, SamplingParams, Completion, TokenEvent,
    EngineMetrics, PrefixMatch, size_pool.
"""

from paged_jax import block_tables, page_pool, sharding
from paged_jax.attention import attend, write_kv
from paged_jax.batch import Batch
from paged_jax.block_tables import BlockTables, PageCopies
from paged_jax.budget import size_pool
from paged_jax.cache import (
    KVPages,
    PagedCache,
    append,
    append_decode,
    copy_pages,
    fork,
    gather_kv,
    release,
    reorder,
    truncate,
    usage,
)
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.errors import EngineBusyError, MemoryBudgetError, MissingBackendError, RequestTooLongError
from paged_jax.layout import NULL_PAGE, KVLayout
from paged_jax.page_pool import PagePool
from paged_jax.prefix import PrefixMatch
from paged_jax.request import Completion, Request, Times, TokenEvent
from paged_jax.sampling import SamplingParams
from paged_jax.stats import EngineMetrics
from paged_jax.steps import Model

__all__ = [
    "NULL_PAGE",
    "Batch",
    "BlockTables",
    "Completion",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineMetrics",
    "KVLayout",
    "KVPages",
    "MemoryBudgetError",
    "MissingBackendError",
    "Model",
    "PageCopies",
    "PagePool",
    "PagedCache",
    "PrefixMatch",
    "Request",
    "RequestTooLongError",
    "SamplingParams",
    "Times",
    "TokenEvent",
    "append",
    "append_decode",
    "attend",
    "block_tables",
    "copy_pages",
    "fork",
    "gather_kv",
    "page_pool",
    "release",
    "reorder",
    "sharding",
    "size_pool",
    "truncate",
    "usage",
    "write_kv",
]
