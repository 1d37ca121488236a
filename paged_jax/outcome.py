"""What a call of the device has computed, taken step by step as if each step had been a call of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paged_jax.answer import Answer
from paged_jax.request import TokenEvent
from paged_jax.sampling import Logprobs
from paged_jax.scheduler import Scheduler, StepPlan
from paged_jax.sequence import SequenceState
from paged_jax.steps import StepOutput


@dataclass
class Outcome:
    """What came of a plan.

    Attributes:
      events: the new tokens, in the order of the steps and in each of the rows.
      ended: sequences that came to their end, in this order too.
      published: pages that decode steps after the first have filled and the index names now: (row, logical page).
      num_steps: steps computed.
      num_tokens: tokens computed in all of them.
      num_unwritten: slots that were taken ahead and not written yet, summed over the steps.
    """

    events: list[TokenEvent] = field(default_factory=list)
    ended: list[SequenceState] = field(default_factory=list)
    published: list[tuple[int, int]] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    num_unwritten: int = 0


def take(
    plan: StepPlan,
    output: StepOutput,
    answers: Mapping[SequenceState, Answer],
    scheduler: Scheduler,
    page_ids: np.ndarray,
) -> Outcome:
    """Gives the answers their tokens and the index its pages.

    Args:
      plan: the plan, which the scheduler has committed.
      output: what the runner gave for it.
      answers: of all sequences of the plan.
      scheduler: takes note of the steps after the first.
      page_ids: int32 [max_seqs, pages_per_seq], the block tables.
    """
    outcome = Outcome()
    if output.prompt_logprobs is not None:
        _take_prompts(plan, np.asarray(output.prompt_logprobs[0]), answers)
    tokens = output.tokens.tolist()
    going = [(row, sequence) for row, (sequence, _) in enumerate(plan.counts)]
    reserved = sum(sequence.steps_left(plan.num_steps) for _, sequence in going) if plan.num_steps > 1 else 0
    for step in range(plan.num_steps):
        if step:
            if outcome.ended:
                going = [(row, sequence) for row, sequence in going if sequence.finish_reason is None]
            if not going or (plan.stops_together and outcome.ended):
                break
            filled = scheduler.go_on([sequence for _, sequence in going], page_ids)
            outcome.published += [(publication.sequence.placed_row, publication.page) for publication in filled]
        logprobs = None if output.logprobs is None else Logprobs(*(values[step] for values in output.logprobs))
        for row, sequence in going:
            if sequence.num_cached < len(sequence.tokens):
                continue  # a chunk that ends inside the prompt
            if len(sequence.tokens) == sequence.max_len:
                answers[sequence].end("length")  # only scored
            else:
                outcome.events.append(answers[sequence].take_token(tokens[step][row], logprobs, row))
            if sequence.finish_reason is not None:
                outcome.ended.append(sequence)
        outcome.num_steps += 1
        outcome.num_tokens += len(going) if step else plan.num_tokens
        if plan.num_steps > 1:
            outcome.num_unwritten += reserved - outcome.num_tokens
    _take_forks(plan, outcome, tokens[0], logprobs, answers)
    return outcome


def _take_prompts(plan: StepPlan, logprobs: np.ndarray, answers: Mapping[SequenceState, Answer]) -> None:
    start = 0
    for sequence, count in plan.counts:
        answers[sequence].take_prompt(logprobs[start : start + count], sequence.num_cached - count)
        start += count


def _take_forks(
    plan: StepPlan,
    outcome: Outcome,
    tokens: list[int],
    logprobs: Logprobs | None,
    answers: Mapping[SequenceState, Answer],
) -> None:
    """The first tokens of children, whose rows come after those of the plan's sequences."""
    forked = [(parent, child) for parent, children in plan.forked for child in children]
    for row, (parent, child) in enumerate(forked, start=len(plan.counts)):
        answers[child].fork_from(answers[parent])
        outcome.events.append(answers[child].take_token(tokens[row], logprobs, row))
        if child.finish_reason is not None:
            outcome.ended.append(child)
