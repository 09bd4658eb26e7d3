"""``/metrics`` in Prometheus' format. Labels are engines, base models and fixed words: series never grow with work.

What is read from the database is the whole deployment's, and every gateway says it: take one, not the sum.
"""

from collections.abc import Sequence
from datetime import datetime

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.versions import Check, Version
from gateway.engines.pool import EngineSlots
from gateway.store.measures import Finished, Live, Queue

_NATS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LONG = (*_SECONDS, 100.0, 300.0, 1000.0)


class Metrics:
    """What this process has seen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("base_model", "engine")
        self._checks = Counter(
            "loopline_gate_checks",
            "Verdicts of the publish gate",
            (*names, "occasion", "verdict"),
            registry=self.registry,
        )
        self._differences = Histogram(
            "loopline_gate_mean_difference_nats",
            "Mean absolute difference between trainer and engine on the canary",
            names,
            buckets=_NATS,
            registry=self.registry,
        )
        self._worst = Gauge(
            "loopline_gate_max_difference_nats",
            "Largest absolute difference of the last canary that passed",
            names,
            registry=self.registry,
        )
        self._tolerance = Gauge(
            "loopline_gate_mean_tolerance_nats",
            "What the mean difference of the last canary that passed was allowed to be",
            names,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "loopline_gate_seconds",
            "Time of one pass through the gate: files, load and canary",
            names,
            buckets=_SECONDS,
            registry=self.registry,
        )

        self.requests = Counter("loopline_requests", "Requests answered", ("dialect", "status"), registry=self.registry)
        self.request_seconds = Histogram(
            "loopline_request_seconds", "Until the last byte", ("dialect",), buckets=_SECONDS, registry=self.registry
        )
        self.tokens = Counter(
            "loopline_tokens", "Units booked, of the whole deployment", ("base_model", "meter"), registry=self.registry
        )
        self.tasks = Gauge("loopline_tasks", "Tasks of this process's event loop", registry=self.registry)
        self.waiting = Gauge("loopline_waiting_requests", "Long polls that wait here", registry=self.registry)
        self.database_up = Gauge("loopline_database_up", "1: it answered the last look", registry=self.registry)
        self._queued = Gauge(
            "loopline_queued_operations", "Operations that wait for a trainer", ("base_model",), registry=self.registry
        )
        self._oldest = Gauge(
            "loopline_queue_oldest_seconds",
            "Age of the oldest of them",
            ("base_model",),
            registry=self.registry,
        )
        self._live = Gauge("loopline_live_sessions", "Live sessions", ("base_model",), registry=self.registry)
        self._recovering = Gauge(
            "loopline_recovering_sessions", "Sessions that are being rebuilt", ("base_model",), registry=self.registry
        )
        kinds = ("base_model", "kind")
        self._waited = Histogram(
            "loopline_operation_wait_seconds", "From submission to start", kinds, buckets=_LONG, registry=self.registry
        )
        self._ran = Histogram(
            "loopline_operation_seconds",
            "From start to end; of a save to its publication",
            (*kinds, "status"),
            buckets=_LONG,
            registry=self.registry,
        )
        self._slots = Gauge(
            "loopline_engine_slots",
            "Versions of an engine: capacity, loaded, in use",
            (*names, "what"),
            registry=self.registry,
        )
        self._calls = Gauge(
            "loopline_engine_calls", "Calls from here: in flight, waiting", (*names, "what"), registry=self.registry
        )

    def answered(self, dialect: str, status: int, seconds: float) -> None:
        self.requests.labels(dialect, str(status)).inc()
        self.request_seconds.labels(dialect).observe(seconds)

    def engine(self, slots: EngineSlots) -> None:
        at = (slots.base_model, slots.engine)
        for what, count in (("capacity", slots.capacity), ("loaded", slots.loaded), ("in_use", slots.in_use)):
            self._slots.labels(*at, what).set(count)
        self._calls.labels(*at, "in flight").set(slots.calls)
        self._calls.labels(*at, "waiting").set(slots.waiting)

    def queues(self, queues: Sequence[Queue], now: datetime) -> None:
        self._queued.clear()
        self._oldest.clear()
        for queue in queues:
            self._queued.labels(queue.base_model).set(queue.waiting)
            self._oldest.labels(queue.base_model).set((now - queue.oldest).total_seconds())

    def sessions(self, live: Sequence[Live]) -> None:
        self._live.clear()
        self._recovering.clear()
        for one in live:
            self._live.labels(one.base_model).set(one.sessions)
            self._recovering.labels(one.base_model).set(one.recovering)

    def finished(self, operation: Finished) -> None:
        at = (operation.base_model, operation.kind)
        self._waited.labels(*at).observe(operation.waited_s)
        self._ran.labels(*at, operation.status).observe(operation.ran_s)

    def saw(self, version: Version, check: Check) -> None:
        """Count a verdict of the gate."""
        at = (version.base_model, check.engine)
        if check.report is None:
            self._checks.labels(*at, check.occasion.value, "failed").inc()
            return
        verdict = "inconclusive" if check.report.inconclusive else "passed"
        self._checks.labels(*at, check.occasion.value, verdict).inc()
        self._differences.labels(*at).observe(check.report.mean_difference)
        self._worst.labels(*at).set(check.report.max_difference)
        self._tolerance.labels(*at).set(check.report.mean_tolerance)
        self._seconds.labels(*at).observe(check.report.seconds)


async def metrics(request: Request) -> Response:
    collected: Metrics = request.state.metrics
    await request.state.scrapes.refresh()
    return Response(generate_latest(collected.registry), media_type=CONTENT_TYPE_LATEST)


ROUTES = (Route("/metrics", metrics, methods=["GET"]),)
