"""Traces: which spans there are, and to which one a piece of work belongs.

A span is named to others, in this process or the next, by its W3C ``traceparent``. What a span says of the work holds
ids, kinds, numbers and codes: never a tenant's content, a key or a path.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

_current: ContextVar[str | None] = ContextVar("traceparent", default=None)

Fact = str | int | float | bool


class SpanKind(StrEnum):
    """Which side of a call a span is."""

    SERVER = "server"
    CLIENT = "client"
    CONSUMER = "consumer"  # of work that was queued


class Span(Protocol):
    """A piece of work that is being timed."""

    @property
    def traceparent(self) -> str | None:
        """What names it as a parent; None: nobody records it."""
        ...

    def rename(self, name: str) -> None: ...

    def set(self, **facts: Fact) -> None:
        """Say more of it; ``a__b`` is written ``a.b``."""
        ...

    def fail(self, code: str) -> None: ...


class Tracer(Protocol):
    """Records spans."""

    def span(self, name: str, kind: SpanKind, *, parent: str | None, **facts: Fact) -> AbstractContextManager[Span]:
        """Time what is done inside; None for ``parent``: a trace of its own. An exception fails it."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet."""
        ...


class Unrecorded:
    """The span and the tracer of those who want no traces."""

    traceparent: str | None = None

    @contextmanager
    def span(self, name: str, kind: SpanKind, *, parent: str | None, **facts: Fact) -> Generator["Unrecorded"]:
        yield self

    def close(self) -> None: ...

    def rename(self, name: str) -> None: ...

    def set(self, **facts: Fact) -> None: ...

    def fail(self, code: str) -> None: ...


def current_traceparent() -> str | None:
    """Return what the work at hand belongs to."""
    return _current.get()


@contextmanager
def belonging_to(span: Span) -> Generator[None]:
    """What is done inside, and by tasks that are begun there, belongs to ``span``."""
    token = _current.set(span.traceparent)
    try:
        yield
    finally:
        _current.reset(token)
