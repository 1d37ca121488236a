"""Whether systems give the same answers.

float32: greedy tokens are the same wherever the two likeliest logits are further apart than twice the error of a logit;
after the first near tie that falls the other way two answers have nothing to do with each other any more.

bfloat16 rounds too coarsely for that. There the float32 answers are given to both systems: how far the log
probabilities of their tokens are apart, and how often another token would have been the likeliest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scripts.compare.loads import Requests

NEAR_TIE = 2e-3
"""Twice 1e-3, the bound on the error of float32 logits that the tests of SmolLM2 hold."""

SCORED = 4
"""Answers that are compared token by token in bfloat16."""

Score = Callable[[Sequence[int]], dict[str, Any]]


def compare_tokens(
    requests: Requests, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], score: Score
) -> dict[str, Any]:
    """Compares float32 answers.

    Args:
      requests: the load.
      ours: this package's answers.
      theirs: the other system's.
      score: of this package in float32.

    Returns:
      "compared": tokens up to where answers part; "near ties": answers that part where the two likeliest logits are
      within NEAR_TIE; "different": answers that part elsewhere, or have another length.
    """
    compared = near_ties = different = 0
    for (prompt, _), our, their in zip(requests, ours, theirs, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(our, their, strict=False)) if a != b), min(len(our), len(their)))
        compared += same
        if same == len(our) == len(their):
            continue
        gap = np.inf if same in (len(our), len(their)) else score([*prompt, *our])["gaps"][len(prompt) + same - 1]
        near_ties += gap <= NEAR_TIE
        different += gap > NEAR_TIE
    return {"compared": compared, "near ties": near_ties, "different": different}


def compare_scores(requests: Requests, answers: Sequence[Sequence[int]], exact: Score, score: Score) -> dict[str, Any]:
    """Compares what a system makes of given answers with this package in float32.

    Args:
      requests: the load.
      answers: this package's float32 answers; the first few are scored.
      exact: scores of this package in float32.
      score: scores of the system.

    Returns:
      "logprob difference": mean absolute difference over the answers' tokens, in nats; "flips": share of the places
      where another token is the likeliest.
    """
    differences, flips = [], []
    for (prompt, _), answer in list(zip(requests, answers, strict=True))[:SCORED]:
        text = [*prompt, *answer]
        wanted, got = (
            {name: np.array(values) for name, values in s(text).items() if name != "peak"} for s in (exact, score)
        )
        part = slice(len(prompt) - 1, None)
        differences.append(np.abs(wanted["logprobs"] - got["logprobs"])[part])
        flips.append((wanted["likeliest"] != got["likeliest"])[part])
    return {
        "logprob difference": float(np.concatenate(differences).mean()),
        "flips": float(np.concatenate(flips).mean()),
    }


def describe(check: dict[str, Any] | None) -> str:
    """A cell of a table."""
    if check is None:
        return ""
    if "error" in check:
        return f"not compared: {check['error']}"
    if "flips" in check:
        return f"logprobs differ by {check['logprob difference']:.3f}, {check['flips']:.1%} flips"
    if check["different"]:
        return f"{check['different']} ANSWERS DIFFER"
    return f"{check['compared']} tokens equal" + (f", {check['near ties']} near ties" if check["near ties"] else "")
