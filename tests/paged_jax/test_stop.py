"""Stop strings: what is streamed joins to the text up to the first one, however the text comes."""

from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

import paged_jax as pj
from models.tokenizer import Tokenizer
from paged_jax.answer import Answer
from paged_jax.prefix import Namespace, PageKeys
from paged_jax.sequence import SequenceState
from paged_jax.stop import StopFilter
from tests.tiny_checkpoint import tiny_tokenizer, vocabulary

STOPS = st.lists(st.text("ab🎉", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text, stop):
    """Looks at every beginning of the text in turn, longest stop string first."""
    for end in range(1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], True
    return text, False


def filtered(pieces, stop):
    stops = StopFilter(stop)
    given = [stops.push(piece) for piece in pieces]
    return [*given, stops.finish()], stops.stopped


@given(pieces=st.lists(st.text("ab🎉", max_size=4), max_size=8), stop=STOPS)
@example(pieces=["abab"], stop=["abab", "b"])
@example(pieces=["a", "a", "b"], stop=["aab", "ab"])
@example(pieces=["aa", "ab"], stop=["aab"])
def test_pieces_join_to_the_text_before_the_first_stop_string(pieces, stop):
    given, stopped = filtered(pieces, stop)
    text, should_stop = expected("".join(pieces), stop)
    assert ("".join(given), stopped) == (text, should_stop)


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), stop=STOPS, later=st.text("ab", max_size=4))
def test_nothing_given_is_ever_taken_back(pieces, stop, later):
    stops = StopFilter(stop)
    given = "".join(stops.push(piece) for piece in pieces)
    assert expected("".join(pieces) + later, stop)[0].startswith(given)


def test_only_what_may_begin_a_stop_string_is_held_back():
    assert filtered(["x", "a", "b", "y", "ab"], ["abc"]) == (["x", "", "", "aby", "", "ab"], False)
    assert filtered(["xab", "cd", "e"], ["abc"]) == (["x", "", "", ""], True)


@pytest.mark.parametrize("pieces", [["hello wor", "ld"], list("hello world"), ["hello world"]])
def test_how_the_text_is_cut_does_not_matter(pieces):
    given, stopped = filtered(pieces, ["lo w", "o wo"])
    assert "".join(given) == "hel"
    assert stopped


@cache
def tokenizer():
    """Byte-level: a character of several bytes is several tokens."""
    return Tokenizer(
        tiny_tokenizer(), add_bos=False, bos_token=None, eos_token=None, eos_ids=frozenset({0}), chat_template=None
    )


IDS = st.lists(
    st.one_of(st.sampled_from(tokenizer().encode("ab🎉")), st.integers(1, len(vocabulary()) - 1)), max_size=20
)


@given(ids=IDS, stop=STOPS, ends=st.booleans())
@example(ids=tokenizer().encode("a🎉"), stop=["🎉"], ends=False)
@example(ids=tokenizer().encode("ba🎉")[:-1], stop=["a"], ends=False)  # held back with half a character, then stopped
def test_tokens_become_text_that_is_never_taken_back(ids, stop, ends):
    """The events of an answer, half characters and end tokens among them, concatenate to its text."""
    ids = [*ids, 0] if ends else [*ids, 5]
    sequence = SequenceState(0, [7], 1, 1 + len(ids), PageKeys(Namespace(), 16))
    answer = Answer(sequence, pj.Request([7], stop=stop), tokenizer())
    events = []
    for token in ids:
        events.append(answer.take_token(token, None, 0))
        if sequence.finish_reason is not None:
            break
    done = answer.completion()
    text, stopped = expected(tokenizer().decode(done.token_ids), stop)
    assert done.text == text == "".join(event.text for event in events)
    assert done.finish_reason == events[-1].finish_reason == ("stop" if stopped or ends else "length")
    assert done.token_ids == ids[: len(events)]
    assert len(events) == len(ids) or stopped
