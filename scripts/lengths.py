"""Loads as lengths alone: how many tokens requests bring and get."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.command_line import UsageError, read_jsonl


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens that are cached at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Load:
    """A family of lengths: prompts and outputs are independent, log-normal, at least 1 token, and cut so that a request
    fits the context.

    Attributes:
      name: what it is called.
      prompt_mean, output_mean: tokens, after the cut.
      prompt_deviation, output_deviation: standard deviations in tokens, before the cut.
    """

    name: str
    prompt_mean: float
    prompt_deviation: float
    output_mean: float
    output_deviation: float

    def draw(self, count: int, *, max_len: int, seed: int) -> list[Lengths]:
        """Lengths of `count` requests, the same for the same seed."""
        rng = np.random.default_rng(seed)
        prompts = _log_normal(rng, self.prompt_mean, self.prompt_deviation, count, max_len // 2)
        outputs = _log_normal(rng, self.output_mean, self.output_deviation, count, max_len // 2)
        return [Lengths(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


# Means: Kwon et al. 2023, figure 11. Spreads are ours, since the paper draws the distributions but gives no number.
# That of ShareGPT's outputs is what makes a sequence hold 458 tokens on average while it runs, as follows from the
# paper's figure 2 (20.4 % of 15,728 slots hold tokens of 7 sequences).
SHAREGPT = Load("ShareGPT-like", 161, 200, 338, 294)
ALPACA = Load("Alpaca-like", 19, 12, 58, 52)


def read_lengths(path: Path, *, max_len: int) -> list[Lengths]:
    """The lengths of a JSONL file, a request a line: {"prompt_tokens": 161, "output_tokens": 338}.

    Raises:
      UsageError: it cannot be read, a line is something else, or a request is longer than `max_len`.
    """
    lengths = []
    for where, record in read_jsonl(path):
        fields = record if isinstance(record, dict) else {}
        request = Lengths(fields.get("prompt_tokens", 0), fields.get("output_tokens", 0))
        if not all(type(value) is int and value >= 1 for value in request):
            raise UsageError(f'{where}: must be {{"prompt_tokens": 161, "output_tokens": 338}}, each at least 1')
        if request.total > max_len:
            raise UsageError(f"{where}: {request.total} tokens are more than max_len = {max_len}; give a larger one")
        lengths.append(request)
    if not lengths:
        raise UsageError(f"{path} holds no request")
    return lengths


def _log_normal(rng: np.random.Generator, mean: float, deviation: float, count: int, longest: int) -> Sequence[int]:
    """Whole numbers from 1 to `longest` whose mean is `mean`, up to rounding."""
    sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
    shape = np.exp(sigma * rng.standard_normal(count))
    scale = mean
    for _ in range(50):  # the cut takes from the tail, and one draw's mean is not the distribution's
        values = np.clip(np.rint(scale * shape), 1, longest)
        scale *= mean / values.mean()
    return values.astype(int).tolist()
