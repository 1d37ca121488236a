"""Stop strings: what is streamed joins to the text up to the first one, however the text comes."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from paged_jax.stop import StopFilter

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
