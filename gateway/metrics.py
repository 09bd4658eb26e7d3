"""``/metrics`` in Prometheus' format. Labels are engines, base models and fixed words: series never grow with work."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.versions import Check, Version

_NATS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


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
    return Response(generate_latest(collected.registry), media_type=CONTENT_TYPE_LATEST)


ROUTES = (Route("/metrics", metrics, methods=["GET"]),)
