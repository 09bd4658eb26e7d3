"""A receiver of traces: what a collector is to the gateway's exporter."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The spans that came, by the service that sent them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[tuple[str, Span]] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_process in request.resource_spans:
            [service] = [one.value.string_value for one in of_process.resource.attributes if one.key == "service.name"]
            for scope in of_process.scope_spans:
                self.spans += [(service, span) for span in scope.spans]


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
