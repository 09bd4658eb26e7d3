"""Traces: a request, its call of an engine and its operation at the trainer are one, without anything of a tenant's."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.types import Receive, Scope, Send

from gateway.traces import OpenTelemetry
from gateway.wire.edge import RequestEdge
from tests.engines.fixtures import scripted_engine
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.spans import running_collector
from tests.wire.training import BASE, datum, new_session, run

__all__ = ["scripted_engine"]

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WORDS = "an unheard-of prompt"


class Told:
    """What the processes told of themselves, and by what the test knows it."""

    def __init__(self, spans: list[tuple[str, Span]], key: str, operations: list[str]) -> None:
        self.spans, self.key, self.operations = spans, key, operations

    def one(self, name: str, *facts: tuple[str, Any]) -> Span:
        [found] = [span for _, span in self.spans if span.name == name and set(facts) <= set(facts_of(span).items())]
        return found


def facts_of(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


@pytest.fixture(scope="module")
def told(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What came of two operations, one of a traced caller, a chat, a chat about nothing, and the end of all."""
    with running_collector() as collector:
        env = {"LOOPLINE_TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with running_gateway(scripted_engine, tmp_path_factory.mktemp("traced") / "data", trainer=True, env=env) as one:
            operations, key = _worked(one), one.keys.owner
        yield Told(collector.spans, key, operations)


def _worked(gateway: Gateway) -> list[str]:
    traced = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "req-traced"}
    with gateway.client() as client, gateway.openai_client() as openai:
        session = new_session(client)["id"]
        path = f"/sessions/{session}/forward_backward"
        first = client.post(path, json={"data": [datum()]}, headers=traced).json()["id"]
        second = run(client, session, "forward_backward", data=[datum()])["id"]
        chat = {"model": BASE, "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
        for stream in (False, True):
            named = {"X-Request-Id": f"req-chat-{stream}"}
            assert openai.post("/chat/completions", json={**chat, "stream": stream}, headers=named).status_code == 200
        assert client.get("/sessions/sess-nobodys").status_code == 404
    return [first, second]


def test_a_request_is_a_child_of_its_caller_and_says_its_route_status_and_request_id(told: Told) -> None:
    route = "/training/v1/sessions/{session_id}/forward_backward"
    span = told.one(f"POST {route}", ("loopline.request_id", "req-traced"))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert facts_of(span) == {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": 202,
        "loopline.request_id": "req-traced",
    }


def test_an_operation_is_a_child_of_the_request_that_submitted_it(told: Told) -> None:
    traced, other = (told.one("operation forward_backward", ("loopline.operation_id", id)) for id in told.operations)
    request = told.one(
        "POST /training/v1/sessions/{session_id}/forward_backward", ("loopline.request_id", "req-traced")
    )
    assert (traced.trace_id, traced.parent_span_id) == (request.trace_id, request.span_id)
    assert other.trace_id != traced.trace_id
    [service] = {service for service, span in told.spans if span.name.startswith("operation")}
    assert service == "loopline-trainer"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_call_is_a_child_of_the_request_that_needs_it(told: Told, stream: bool) -> None:
    request = told.one("POST /v1/chat/completions", ("loopline.request_id", f"req-chat-{stream}"))
    [call] = [
        span
        for _, span in told.spans
        if span.parent_span_id == request.span_id and facts_of(span).get("server.address")
        if span.name == "POST /v1/chat/completions"
    ]
    assert call.trace_id == request.trace_id
    assert call.kind == Span.SPAN_KIND_CLIENT
    assert request.start_time_unix_nano <= call.start_time_unix_nano < call.end_time_unix_nano
    assert call.end_time_unix_nano <= request.end_time_unix_nano


def test_a_refusal_is_no_failure_of_the_gateway(told: Told) -> None:
    span = told.one("GET /training/v1/sessions/{session_id}", ("http.response.status_code", 404))
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_no_span_holds_a_prompt_a_key_or_a_path(told: Told) -> None:
    texts = [str(value) for _, span in told.spans for value in (span.name, *facts_of(span).values())]
    assert len(told.spans) > 8
    for held_back in (WORDS, told.key, told.key.split("-")[1], "sess-nobodys"):
        assert not [text for text in texts if held_back in text]


async def test_an_answer_of_500_fails_its_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError(WORDS)

    transport = httpx.ASGITransport(RequestEdge(broken, OpenTelemetry(provider)))

    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        with suppress(RuntimeError):
            await client.get("/anywhere")
    [span] = exporter.get_finished_spans()
    assert (span.name, span.status.status_code) == ("GET", StatusCode.ERROR)
    assert span.attributes is not None
    assert span.attributes["error.type"] == "RuntimeError"
    assert (span.events, span.status.description) == ((), None)


def _python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_opentelemetry_is_not_imported_where_traces_are_off() -> None:
    program = (
        "import sys, gateway.app, trainer.loop; from gateway.traces import open_tracer;"
        "open_tracer(wanted=False, service='a');"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert _python(program) == "[]"


def test_traces_that_cannot_be_sent_say_what_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.exporter'] = None;"
        "from gateway.traces import TracesUnavailable, open_tracer\n"
        "try:\n  open_tracer(wanted=True, service='a')\nexcept TracesUnavailable as error:\n  print(error)"
    )
    assert "pip install 'loopline-server[otel]'" in _python(program)
