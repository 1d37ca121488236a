"""The loads that all systems serve: prompts as token ids, and how many tokens to generate."""

import random
from collections.abc import Callable, Sequence

Requests = list[tuple[list[int], int]]
Encode = Callable[[str], list[int]]

PROMPTS = ("The capital of France is", "Once upon a time", "def fib(n):", "The quick brown")
NEW_TOKENS = 64
INSTRUCTIONS = "You answer for the front desk of a museum. Be short, be kind, and say so when you do not know. " * 15
QUESTIONS = ("the dinosaurs", "old maps", "the cloakroom", "a guided tour", "Roman glass", "the garden", "early clocks")


def plain(encode: Encode, count: int, new_tokens: int = NEW_TOKENS) -> Requests:
    """`count` requests of `new_tokens` tokens from prompts of about 5."""
    return [(encode(PROMPTS[i % len(PROMPTS)]), new_tokens) for i in range(count)]


def shared(encode: Encode, count: int = 16) -> Requests:
    """Requests of 32 tokens whose prompts begin with the same 340 or so."""
    return [
        (encode(f"{INSTRUCTIONS}\nVisitor {i}: Where do I find {QUESTIONS[i % len(QUESTIONS)]}?\nDesk:"), 32)
        for i in range(count)
    ]


def mixed(encode: Encode, count: int = 64) -> Requests:
    """Requests of 4 to 400 tokens, evenly spread, in an order of chance that is always the same."""
    lengths = [4 + round(396 * i / (count - 1)) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return [(encode(PROMPTS[i % len(PROMPTS)]), length) for i, length in enumerate(lengths)]


LOADS: dict[str, Callable[[Encode], Requests]] = {
    "plain-1": lambda encode: plain(encode, 1),
    "plain-8": lambda encode: plain(encode, 8),
    "plain-16": lambda encode: plain(encode, 16),
    "plain-32": lambda encode: plain(encode, 32),
    "shared-16": shared,
    "mixed-64": mixed,
}


def longest(loads: Sequence[Requests]) -> int:
    """Tokens of the longest request, prompt and answer."""
    return max(len(prompt) + count for requests in loads for prompt, count in requests)
