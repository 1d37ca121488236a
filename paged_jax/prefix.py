"""The prefix index: which page holds which tokens after which prefix, so that equal prefixes resolve to the same pages.

Plain Python on the host. Full pages are named by a chain of hashes: a page's key is the SHA-256 of its parent's key
and its tokens, and the first page's parent is the hash of what sets a request apart (`Namespace`). A hit is an
unbroken chain from the first page, every page's tokens compared as well: a collision is a miss. Hash chains over pages
as in Kwon et al. 2023, section 4.4, and radix sharing as in Zheng et al. 2024 (SGLang).

The index holds one reference of its own on every page it names (the caller retains it in the pool), so named pages are
never written. Pages that no sequence uses wait in the order of their last use, the tail of a chain before its head,
until their room is needed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_ROOT_TAG, _PAGE_TAG = b"root", b"page"


@dataclass(frozen=True)
class Namespace:
    """What sets equal tokens apart: pages are shared only inside one namespace.

    Attributes:
      cache_salt: a secret of the caller, against guessing at others' prompts by timing; None for none.
      extra_keys: whatever else the keys and values depend on, such as an adapter's name or an image's digest.
    """

    cache_salt: str | None = None
    extra_keys: tuple[str | bytes | int, ...] = ()

    def digest(self) -> bytes:
        """The parent key of first pages: tagged and length-prefixed, so that no two namespaces read the same."""
        parts: list[tuple[bytes, bytes]] = []
        if self.cache_salt is not None:
            parts.append((b"salt", self.cache_salt.encode()))
        for key in self.extra_keys:
            match key:
                case str():
                    parts.append((b"text", key.encode()))
                case bytes():
                    parts.append((b"data", key))
                case int():
                    parts.append((b"int_", str(key).encode()))
        return _digest(_ROOT_TAG + b"".join(tag + len(data).to_bytes(8, "little") + data for tag, data in parts))


@dataclass(eq=False, slots=True)
class CachedPage:
    """A page that the index names.

    Attributes:
      key: its chained hash.
      parent: the page before it, or the namespace of a first page.
      tokens: what it holds.
      page_id: where.
      users: running sequences whose tables name it through the index.
    """

    key: bytes
    parent: "CachedPage | Namespace"
    tokens: tuple[int, ...]
    page_id: int
    users: int = 0


@dataclass(frozen=True)
class PrefixMatch:
    """Why a chain of cached pages ends where it does.

    Attributes:
      num_tokens: tokens found in cached pages.
      reason: "all full pages are cached", "first different token", "evicted", "not cached", "page not full" or
        "other namespace" (the same tokens are there under another salt or other extra keys).
      position: the first token that is not found.
    """

    num_tokens: int
    reason: str
    position: int


@dataclass
class PageKeys:
    """Keys of a growing sequence's full pages, each hashed once.

    Attributes:
      namespace: the sequence's.
      page_size: tokens a page.
    """

    namespace: Namespace
    page_size: int
    _keys: list[bytes] = field(default_factory=list)

    def upto(self, token_ids: Sequence[int], num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` pages of `token_ids`, which must hold them in full."""
        parent = self._keys[-1] if self._keys else self.namespace.digest()
        for page in range(len(self._keys), num_pages):
            parent = page_key(parent, token_ids[page * self.page_size : (page + 1) * self.page_size])
            self._keys.append(parent)
        return self._keys[:num_pages]


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a page: SHA-256 over its parent's key (32 bytes) and its tokens (4 bytes each, little endian)."""
    return _digest(_PAGE_TAG + parent + np.asarray(tokens, "<i4").tobytes())


class PrefixIndex:
    """Published pages by key.

    Args:
      page_size: tokens a page.

    Attributes:
      evictions: pages evicted so far.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictions = 0
        self._pages: dict[bytes, CachedPage] = {}
        self._unused: OrderedDict[bytes, CachedPage] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # remembered for `explain` only

    def __len__(self) -> int:
        """Pages that the index names."""
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        """Whether a page has this key."""
        return key in self._pages

    @property
    def num_unused(self) -> int:
        """Pages that the index alone holds: what can be evicted."""
        return len(self._unused)

    @property
    def unused_page_ids(self) -> list[int]:
        """Pages that the index alone holds, the first to be evicted first."""
        return [page.page_id for page in self._unused.values()]

    def match(self, keys: PageKeys, token_ids: Sequence[int]) -> list[CachedPage]:
        """The longest unbroken chain of cached pages at the start of `token_ids`."""
        chain: list[CachedPage] = []
        parent: CachedPage | Namespace = keys.namespace
        for index in range(len(token_ids) // self.page_size):
            page = self._pages.get(keys.upto(token_ids, index + 1)[-1])
            if page is None or not self._is(page, parent, self._tokens(token_ids, index)):
                break
            chain.append(page)
            parent = page
        return chain

    def acquire(self, chain: Sequence[CachedPage]) -> None:
        """A sequence starts to use the pages: they cannot be evicted."""
        for page in chain:
            if page.users == 0:
                del self._unused[page.key]
            page.users += 1

    def release(self, chain: Sequence[CachedPage]) -> None:
        """A sequence stops using the pages; the tail of the chain will be evicted before its head."""
        for page in reversed(chain):
            page.users -= 1
            # A page that a reset has forgotten is the pool's business alone.
            if page.users == 0 and self._pages.get(page.key) is page:
                self._unused[page.key] = page

    def publish(self, key: bytes, parent: CachedPage | Namespace, tokens: tuple[int, ...], page_id: int) -> CachedPage:
        """Names a page that its writer goes on using; the key is new (`in`) and its parent still here (`has`)."""
        page = CachedPage(key, parent, tokens, page_id, users=1)
        self._pages[key] = page
        self._evicted.pop(key, None)
        return page

    def has(self, parent: CachedPage | Namespace) -> bool:
        """Whether a chain may go on after `parent`: it is a namespace, or a page that is still here."""
        return isinstance(parent, Namespace) or self._pages.get(parent.key) is parent

    def evict(self, count: int) -> list[int]:
        """Forgets the `count` pages whose last use is longest ago and returns their ids, for the pool to release."""
        page_ids = []
        for _ in range(count):
            key, page = self._unused.popitem(last=False)
            del self._pages[key]
            self._evicted[key] = None
            page_ids.append(page.page_id)
        self.evictions += count
        while len(self._evicted) > max(len(self._pages), 1024):
            self._evicted.popitem(last=False)
        return page_ids

    def forget(self) -> list[int]:
        """Forgets every page, those in use too, and returns their ids, for the pool to release."""
        page_ids = [page.page_id for page in self._pages.values()]
        self._pages.clear()
        self._unused.clear()
        self._evicted.clear()
        return page_ids

    def explain(self, keys: PageKeys, token_ids: Sequence[int]) -> PrefixMatch:
        """How far the cached chain reaches into `token_ids`, and why it ends there."""
        chain = self.match(keys, token_ids)
        cached, size = len(chain) * self.page_size, self.page_size
        rest = tuple(token_ids[cached : cached + size])
        if not rest:
            return PrefixMatch(cached, "all full pages are cached", cached)
        parent: CachedPage | Namespace = chain[-1] if chain else keys.namespace
        siblings = [page.tokens for page in self._pages.values() if _same(page.parent, parent)]
        shared = max((common_length(tokens, rest) for tokens in siblings), default=0)
        if len(rest) < size:
            if siblings and shared < len(rest):
                return PrefixMatch(cached, "first different token", cached + shared)
            return PrefixMatch(cached, "page not full", cached)
        if keys.upto(token_ids, len(chain) + 1)[-1] in self._evicted:
            return PrefixMatch(cached, "evicted", cached)
        if siblings:
            return PrefixMatch(cached, "first different token", cached + shared)
        if any(isinstance(page.parent, Namespace) and page.tokens == rest for page in self._pages.values()):
            return PrefixMatch(cached, "other namespace", cached)
        return PrefixMatch(cached, "not cached", cached)

    def _tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])

    @staticmethod
    def _is(page: CachedPage, parent: CachedPage | Namespace, tokens: tuple[int, ...]) -> bool:
        return page.tokens == tokens and _same(page.parent, parent)


def _same(a: CachedPage | Namespace, b: CachedPage | Namespace) -> bool:
    return a is b or (isinstance(a, Namespace) and a == b)  # a dataclass without eq equals itself alone


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
