"""Traces by OpenTelemetry, which is imported only where they are wanted. The SDK reads its own ``OTEL_...`` variables:
where spans go, what is sampled, what the process is called.

A leaf: every process may import it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.core.tracing import Fact, Span, SpanKind, Tracer, Unrecorded

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider


class TracesUnavailable(Exception):
    """Traces are asked for, and what sends them is not installed."""


def open_tracer(*, wanted: bool, service: str) -> Tracer:
    """Return the tracer of a process; ``service`` is its name unless OTEL_SERVICE_NAME is set.

    Raises:
        TracesUnavailable: the message says what to install.
    """
    if not wanted:
        return Unrecorded()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource, get_aggregated_resources
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesUnavailable(
            "LOOPLINE_TRACES needs OpenTelemetry: pip install 'loopline-server[otel]', or unset it"
        ) from error
    named = get_aggregated_resources([OTELResourceDetector()], Resource({"service.name": service}))
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetry(provider)


class OpenTelemetry:
    """The Tracer of a provider."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("loopline")
        self._parents = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, kind: SpanKind, *, parent: str | None, **facts: Fact) -> Generator[Span]:
        from opentelemetry import trace
        from opentelemetry.context import Context

        above = self._parents.extract({} if parent is None else {"traceparent": parent}, context=Context())
        recorded = self._tracer.start_span(
            name, context=above, kind=trace.SpanKind[kind.name], attributes=_attributes(facts)
        )
        span = _Recorded(recorded)
        try:
            yield span
        except Exception as error:
            span.fail(type(error).__name__)
            raise
        finally:
            recorded.end()

    def close(self) -> None:
        self._provider.shutdown()


class _Recorded:
    def __init__(self, span: "trace.Span") -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        at = self._span.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, **facts: Fact) -> None:
        self._span.set_attributes(_attributes(facts))

    def fail(self, code: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(StatusCode.ERROR)


def _attributes(facts: dict[str, Fact]) -> dict[str, Fact]:
    return {name.replace("__", "."): value for name, value in facts.items()}
