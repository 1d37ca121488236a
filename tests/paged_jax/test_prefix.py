"""The prefix index alone: chains, collisions, eviction order, namespaces."""

import hashlib

import pytest

from paged_jax import prefix
from paged_jax.prefix import Namespace, PageKeys, PrefixIndex

SIZE = 4
PROMPT = list(range(100, 111))  # two full pages and three tokens


@pytest.fixture
def index():
    return PrefixIndex(SIZE)


def publish(index, tokens, namespace=Namespace(), first_page=1):  # noqa: B008 (frozen)
    """Names all full pages of `tokens` that are new, as one sequence that goes on using them."""
    keys = PageKeys(namespace, SIZE)
    chain = index.match(keys, tokens)
    index.acquire(chain)
    parent = chain[-1] if chain else namespace
    for page in range(len(chain), len(tokens) // SIZE):
        key = keys.upto(tokens, page + 1)[page]
        assert key not in index
        assert index.has(parent)
        parent = index.publish(key, parent, tuple(tokens[page * SIZE : (page + 1) * SIZE]), first_page + page)
        chain.append(parent)
    return chain


def hits(index, tokens, namespace=Namespace()):  # noqa: B008 (frozen)
    return [page.page_id for page in index.match(PageKeys(namespace, SIZE), tokens)]


def test_only_full_pages_of_an_unbroken_chain_hit(index):
    publish(index, PROMPT)
    assert hits(index, PROMPT) == [1, 2]
    assert hits(index, PROMPT[:8]) == [1, 2]
    assert hits(index, PROMPT[:7]) == [1]
    assert hits(index, PROMPT[:3]) == []
    assert hits(index, [*PROMPT[:3], 0, *PROMPT[4:]]) == [], "the first different token ends the chain"
    assert hits(index, [*PROMPT[:4], 0, *PROMPT[5:]]) == [1]
    assert hits(index, PROMPT[4:]) == [], "the second page's tokens after no first page"


def test_the_key_of_a_page_depends_on_every_token_before_it():
    tokens = list(range(12))
    changed = [99, *tokens[1:]]
    keys, other = PageKeys(Namespace(), SIZE).upto(tokens, 3), PageKeys(Namespace(), SIZE).upto(changed, 3)
    assert not set(keys) & set(other)


def test_keys_of_a_growing_sequence_are_those_of_the_whole():
    tokens, growing = list(range(40)), PageKeys(Namespace("s"), SIZE)
    for length in range(41):
        growing.upto(tokens[:length], length // SIZE)
    assert growing.upto(tokens, 10) == PageKeys(Namespace("s"), SIZE).upto(tokens, 10)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace(cache_salt="X"), Namespace(extra_keys=("X",))),
        (Namespace(cache_salt=""), Namespace()),
        (Namespace(extra_keys=("1",)), Namespace(extra_keys=(1,))),
        (Namespace(extra_keys=("X",)), Namespace(extra_keys=(b"X",))),
        (Namespace(extra_keys=("ab", "c")), Namespace(extra_keys=("a", "bc"))),
        (Namespace(extra_keys=("a", "b")), Namespace(extra_keys=("b", "a"))),
        (Namespace(cache_salt="a", extra_keys=("b",)), Namespace(extra_keys=("a", "b"))),
    ],
    ids=str,
)
def test_namespaces_do_not_share(index, one, other):
    assert one.digest() != other.digest()
    publish(index, PROMPT, one)
    assert hits(index, PROMPT, one) == [1, 2]
    assert hits(index, PROMPT, other) == []


def test_a_collision_is_a_miss(index, monkeypatch):
    monkeypatch.setattr(prefix, "_digest", lambda data: hashlib.sha256(b"").digest())
    publish(index, PROMPT[:4])
    assert hits(index, PROMPT[:4]) == [1]
    assert hits(index, [0, 0, 0, 0]) == []
    assert hits(index, PROMPT[:4], Namespace("salt")) == [], "the same tokens in a namespace whose hash collides"
    assert hits(index, PROMPT[:4] * 2) == [1], "the same tokens and key, but as the second page"


def test_pages_in_use_are_not_evicted_and_the_tail_goes_first(index):
    first = publish(index, list(range(12)))
    assert index.num_unused == 0
    with pytest.raises(KeyError):
        index.evict(1)
    second = publish(index, [*range(8), 50, 51, 52, 53], first_page=5)
    assert [page.page_id for page in second] == [1, 2, 7]
    index.release(first)
    assert index.num_unused == 1, "the second still uses the shared head"
    assert index.evict(1) == [3]
    index.release(second)
    assert index.evict(2) == [7, 2]
    assert hits(index, list(range(12))) == [1]
    assert index.evictions == 3


def test_the_least_recently_used_chain_goes_first(index):
    chains = [publish(index, [number] * 8, first_page=10 * number) for number in (1, 2, 3)]
    for chain in chains:
        index.release(chain)
    again = index.match(PageKeys(Namespace(), SIZE), [1] * 8)
    index.acquire(again)
    index.release(again)
    assert index.evict(6) == [21, 20, 31, 30, 11, 10]
    assert len(index) == 0


def test_no_page_hangs_on_an_evicted_one(index):
    chain = publish(index, list(range(8)))
    index.release(chain)
    index.evict(2)
    assert not index.has(chain[1])
    assert not index.has(chain[0])
    assert index.has(Namespace())


def test_hits_end_at_a_gap(index):
    chain = publish(index, list(range(12)))
    index.release(chain[1:2])
    assert index.evict(1) == [2]
    assert hits(index, list(range(12))) == [1], "the third page is still here, but nothing leads to it"


def test_forgetting_pages_in_use_leaves_nothing_to_evict_twice(index):
    chain = publish(index, PROMPT)
    assert sorted(index.forget()) == [1, 2]
    publish(index, PROMPT, first_page=5)
    index.release(chain)
    assert index.num_unused == 0, "the forgotten pages belong to their sequence alone"
    assert hits(index, PROMPT) == [5, 6]


def explain(index, tokens, namespace=Namespace()):  # noqa: B008 (frozen)
    match = index.explain(PageKeys(namespace, SIZE), tokens)
    return match.num_tokens, match.reason, match.position


def test_explain_says_why_a_chain_ends(index):
    chain = publish(index, list(range(12)))
    assert explain(index, list(range(12))) == (12, "all full pages are cached", 12)
    assert explain(index, list(range(14))) == (12, "page not full", 12)
    assert explain(index, [*range(6), 99, 7, 8]) == (4, "first different token", 6)
    assert explain(index, [*range(6), 99]) == (4, "first different token", 6)
    assert explain(index, list(range(12)), Namespace("salt")) == (0, "other namespace", 0)
    assert explain(index, [99] * 8) == (0, "first different token", 0)
    assert explain(index, list(range(16))) == (12, "not cached", 12)
    index.release(chain)
    index.evict(1)
    assert explain(index, list(range(12))) == (8, "evicted", 8)
