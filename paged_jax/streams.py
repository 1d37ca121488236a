"""Tokens of single requests as iterators, over an engine whose steps serve all of them."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from paged_jax.request import TokenEvent


class Streams:
    """Deals the tokens of steps out to those who iterate; whoever lacks a token makes the next step.

    Args:
      step: computes a step and calls `deal` with its tokens.
      abort: ends a request; one that is finished stays so.
      is_alive: whether a request is waiting or running.
      lock: held by whoever changes the engine.
    """

    def __init__(
        self,
        *,
        step: Callable[[], object],
        abort: Callable[[int], None],
        is_alive: Callable[[int], bool],
        lock: threading.RLock,
    ) -> None:
        self._step = step
        self._abort = abort
        self._is_alive = is_alive
        self._lock = lock
        self._events: dict[int, deque[TokenEvent]] = {}

    @property
    def any_open(self) -> bool:
        """Whether somebody waits for single tokens."""
        return bool(self._events)

    def open(self, request_id: int) -> None:
        """Keeps the tokens of a request from now on."""
        self._events[request_id] = deque()

    def deal(self, events: Iterable[TokenEvent]) -> None:
        """Takes the tokens of a step."""
        for event in events:
            if event.request_id in self._events:
                self._events[event.request_id].append(event)

    def tokens(self, request_id: int) -> Iterator[TokenEvent]:
        """The tokens of a request that is open; closing the iterator early aborts it."""
        try:
            while (event := self._next(request_id)) is not None:
                yield event
        finally:
            self._close(request_id)

    async def tokens_async(self, request_id: int) -> AsyncIterator[TokenEvent]:
        """As `tokens`; steps run in a thread."""
        try:
            while (event := await asyncio.to_thread(self._next, request_id)) is not None:
                yield event
        finally:
            self._close(request_id)

    def _next(self, request_id: int) -> TokenEvent | None:
        events = self._events[request_id]
        while True:
            with self._lock:
                if events:
                    return events.popleft()
                if not self._is_alive(request_id):
                    return None
                self._step()

    def _close(self, request_id: int) -> None:
        self._abort(request_id)
        del self._events[request_id]
