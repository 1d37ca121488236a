"""What a compiled program moves between devices."""

import re
from typing import Final

_NAMES: Final = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"


def collectives(program: str) -> list[str]:
    """The instructions of a program's HLO text that move anything between devices."""
    return re.findall(rf"^.*= .*\b(?:{_NAMES})(?:-start)?\(.*$", program, re.MULTILINE)


def moved_pages(program: str, rows: int) -> list[str]:
    """Those that move pages or scales, or some of their lanes; `rows` is the pool's first axis and nothing else's."""
    return [line for line in collectives(program) if re.search(rf"\[{rows},", line)]
