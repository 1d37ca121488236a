"""The errors that a caller may want to tell apart."""


class RequestTooLongError(ValueError):
    """A request can never fit: its prompt, or its prompt and its wanted tokens, exceed the context or the pool."""


class MemoryBudgetError(ValueError):
    """The memory that is left for pages does not hold one sequence of the wanted length."""


class EngineBusyError(RuntimeError):
    """What was asked for cannot be done while requests run."""


class MissingBackendError(RuntimeError):
    """The CPU backend, on which the allocator runs, is not available."""
