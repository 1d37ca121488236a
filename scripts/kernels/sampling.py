"""The case matrix and its pairwise sample.

A case is a geometry (what compiles anew: shapes, dtype, static arguments) and a profile (what the operands hold).
Compiling costs seconds and running milliseconds, so that a sample has few geometries and several profiles of each.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final

from scripts.kernels.cases import NO_WINDOW, Case

type Choice = dict[str, Any]
type Factors = Mapping[str, Sequence[Any]]

GEOMETRY: Final[Factors] = {
    "heads": ((1, 1), (4, 4), (9, 3), (14, 2), (8, 1), (40, 10)),
    "head_dim": (16, 64, 80, 128, 256),
    "page_size": (1, 4, 16, 64),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_dtype": (None, "int8", "float8_e4m3fn"),
    "logit_soft_cap": (None, 2.0),
    "layers": ((1, 0), (2, 0), (3, 2)),
    "traced_offset": (True, False),
    "max_query_len": (1, 24, 2048),
    "extra_pages": (0, 3),
}
KERNEL_GEOMETRIES: Final[Mapping[str, Factors]] = {
    "mosaic_gpu": {
        **GEOMETRY,
        "heads": ((1, 1), (3, 1), (4, 2), (7, 1), (8, 1), (16, 1)),
        "head_dim": (64, 128, 256),
        "page_size": (8, 16, 32, 64, 128),
        "dtype": ("bfloat16", "float16"),
        "kv_dtype": (None, "int8", "float8_e4m3fn"),
        "layers": ((1, 0), (3, 2)),
        "max_query_len": (1, 24),
    },
    "mosaic_tpu": {
        **GEOMETRY,
        "heads": ((4, 4), (9, 3), (14, 2), (8, 1), (40, 10)),
        "head_dim": (64, 128, 256),
        "page_size": (8, 16, 64, 128),
        "dtype": ("float32", "bfloat16"),
        "kv_dtype": (None,),
    },
}
"""Kernel -> the geometries that it takes in any combination."""

PROFILE: Final[Factors] = {
    "lengths": ("tiny", "edges", "pages", "long", "mixed", "empty"),
    "queries": ("decode", "prefill", "chunk", "mixed", "idle", "blank"),
    "window": ("none", "1", "page-1", "page", "page+1", "all"),
    "padding_seqs": (0, 2),
    "padding_rows": (False, True),
    "shared_prefix": (False, True),
}

_NUM_SEQS: Final = 6
_NUM_TOKENS: Final = 24  # of a geometry that takes more than decode
_MAX_LEN: Final = 1000
_MAX_LANES: Final = 2048  # of a page; keeps the pool and the reference's copy of it small


def possible(choice: Choice) -> bool:
    """Whether a choice, perhaps partial, describes a case."""
    if "heads" in choice and "head_dim" in choice and choice["heads"][1] * 2 * choice["head_dim"] > _MAX_LANES:
        return False
    return choice.get("max_query_len") != 1 or choice.get("queries", "decode") in ("decode", "idle", "blank")


def pairs_of(choice: Choice) -> set[Any]:
    return set(combinations(sorted(choice.items()), 2))


def all_pairs(factors: Factors) -> set[Any]:
    """Every pair of values of two different factors that can occur."""
    return {
        pair
        for a, b in combinations(sorted(factors), 2)
        for x, y in product(factors[a], factors[b])
        if possible({a: x, b: y})
        for pair in pairs_of({a: x, b: y})
    }


def pairwise(factors: Factors, count: int, rng: random.Random, fixed: Sequence[Choice] = ({},)) -> list[Choice]:
    """`count` choices that cover pairs greedily (AETG: Cohen et al. 1997); choice i extends `fixed[i % len(fixed)]`."""
    uncovered = all_pairs(factors)
    choices = []
    for i in range(count):
        best: tuple[int, Choice] = (-1, {})
        for _ in range(20):
            choice = dict(fixed[i % len(fixed)])
            rest = [name for name in factors if name not in choice]
            rng.shuffle(rest)
            for name in rest:
                values = [v for v in factors[name] if possible({**choice, name: v})]
                rng.shuffle(values)
                choice[name] = max(values, key=lambda v: len(_new_pairs(choice, name, v) & uncovered))
            gain = len(pairs_of(choice) & uncovered)
            if gain > best[0]:
                best = gain, choice
        uncovered -= pairs_of(best[1])
        choices.append(best[1])
    return choices


def _new_pairs(choice: Choice, name: str, value: Any) -> set[Any]:
    return {tuple(sorted(((name, value), item))) for item in choice.items()}


def sample(num_geometries: int, count: int, seed: int, geometry: Factors = GEOMETRY) -> list[Case]:
    """`count` cases over `num_geometries` geometries, both pairwise, each with a seed of its own."""
    rng = random.Random(seed)
    geometries = pairwise(geometry, num_geometries, rng)
    choices = pairwise({**geometry, **PROFILE}, count, rng, geometries)
    return [make_case(choice, rng) for choice in choices]


def full(seed: int, geometry: Factors = GEOMETRY) -> list[Case]:
    """The product of what decides which keys are seen, the geometries pairwise complete and taken in turn."""
    rng = random.Random(seed)
    geometries = pairwise(geometry, 40, rng)
    profiles = [dict(zip(PROFILE, values, strict=True)) for values in product(*PROFILE.values())]
    rng.shuffle(profiles)
    cases = []
    for i, profile in enumerate(profiles):
        usable = [g for g in geometries if possible({**g, **profile})]
        cases.append(make_case({**usable[i % len(usable)], **profile}, rng))
    return cases


def make_case(choice: Choice, rng: random.Random) -> Case:
    """The case that a complete choice stands for; what the choice leaves open is drawn."""
    page_size: int = choice["page_size"]
    num_heads, num_kv_heads = choice["heads"]
    num_layers, layer = choice["layers"]
    # One shape a geometry, whatever the profile, so that it compiles once.
    decode_only = choice["max_query_len"] == 1
    num_tokens = _NUM_SEQS + 3 if decode_only else _NUM_TOKENS
    pages_per_seq = -(-_MAX_LEN // page_size) + choice["extra_pages"]
    num_pages = 2 * -(-_MAX_LEN // page_size) + _NUM_SEQS * (-(-(3 * page_size + 5) // page_size)) + 4

    num_live = _NUM_SEQS - choice["padding_seqs"]
    seq_lens = _lengths(choice["lengths"], page_size, num_live, rng)
    if choice["queries"] == "blank" and any(seq_lens):
        seq_lens[rng.randrange(num_live)] = 0
    wanted = num_tokens - (rng.randint(1, 4) if choice["padding_rows"] else 0)
    query_lens = _query_lens(choice["queries"], seq_lens, wanted, 1 if decode_only else _NUM_TOKENS, rng)
    window = {"none": NO_WINDOW, "1": 1, "page-1": max(1, page_size - 1), "page": page_size, "page+1": page_size + 1}
    return Case(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=choice["head_dim"],
        dtype=choice["dtype"],
        kv_dtype=choice["kv_dtype"],
        sliding_window=window.get(choice["window"], max(seq_lens) + 7),
        logit_soft_cap=choice["logit_soft_cap"],
        pages_per_seq=pages_per_seq,
        num_pages=num_pages,
        num_layers=num_layers,
        layer=layer,
        traced_offset=choice["traced_offset"],
        padding_seqs=choice["padding_seqs"],
        padding_rows=num_tokens - sum(query_lens),
        max_query_len=choice["max_query_len"],
        shared_prefix=choice["shared_prefix"],
        seed=rng.randrange(2**32),
    )


def _lengths(kind: str, page_size: int, count: int, rng: random.Random) -> list[int]:
    tiny = (0, 1, 2)
    edges = (max(1, page_size - 1), page_size, page_size + 1)
    pages = (2 * page_size, 3 * page_size - 1, 3 * page_size + 5)
    long = (513, 777, _MAX_LEN)
    if kind == "empty":
        return [0] * count
    if kind in ("tiny", "edges", "pages"):
        return [rng.choice({"tiny": tiny, "edges": edges, "pages": pages}[kind]) for _ in range(count)]
    lengths = [rng.choice(tiny + edges + pages) for _ in range(count)]
    for s in rng.sample(range(count), 2 if kind == "long" else 1):
        lengths[s] = rng.choice(long)
    return lengths


def _query_lens(kind: str, seq_lens: list[int], wanted: int, longest: int, rng: random.Random) -> list[int]:
    """Query lengths that fill `wanted` rows as far as the kind and the lengths allow."""
    room = wanted
    query_lens = []
    idle = rng.randrange(len(seq_lens)) if kind == "idle" else None
    for s, length in enumerate(seq_lens):
        # Blank: an empty sequence may have queries (a decode step's inactive row).
        most = min(room, longest, length or (1 if longest == 1 else 3) * (kind == "blank"))
        if s == idle:
            most = 0
        elif kind == "decode" or (kind == "mixed" and s % 2):
            most = min(most, 1)
        elif kind in ("chunk", "mixed", "idle", "blank") and most:
            most = rng.randint(1, min(most, max(1, wanted // 2)))
        query_lens.append(most)
        room -= most
    if kind in ("prefill", "chunk"):
        for s, length in enumerate(seq_lens):
            more = min(room, length - query_lens[s], longest - query_lens[s])
            query_lens[s] += more
            room -= more
    return query_lens
