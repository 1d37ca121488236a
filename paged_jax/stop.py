"""Ends a text at a stop string, piece by piece, without ever giving a character that may belong to one."""

from collections.abc import Sequence


class StopFilter:
    """Takes a text in pieces of any size and gives it on up to where the first stop string to be completed begins.

    Of stop strings that are completed by the same character, the longest counts. What is given does not depend on how
    the text is cut into pieces.

    Args:
      stop: the stop strings, none of them empty.

    Attributes:
      stopped: a stop string was found; nothing is given any more.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is now certain; what may be the beginning of a stop string is held back."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        kept = len(text) - self._longest_beginning(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """What is held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of the text with which some stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
