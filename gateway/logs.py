"""Structured logs: one JSON object a line, the request id in each, nothing secret and no control characters in any.

Everything that looks like an API key is cut to its id, wherever it occurs; a log line can therefore not be used to
call the gateway, and text from outside cannot forge one.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import orjson
import structlog

_KEY = re.compile(r"(tml-[0-9a-z]{8})[0-9A-Za-z-]*")
_BEARER = re.compile(r"(?i)(bearer\s+)(?!tml-)[^\s\"',]+")
_SECRET_FIELDS = re.compile(r"(?i)(authorization|api[_-]?key|secret|password|master_key|engine_key)$")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def redact(text: str) -> str:
    """Return ``text`` without secrets and with control characters escaped."""
    text = _BEARER.sub(r"\1[redacted]", _KEY.sub(r"\1...", text))
    return _CONTROL.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text
    )


def configure(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send structlog, the standard library's loggers (uvicorn's included) and warnings to ``stream`` as JSON lines."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _redact_all,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)  # a library's warning is an event like others, not a line that no parser reads
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"  # our own access line replaces it
    for name in ("httpx", "httpcore", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _redact_all(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if _SECRET_FIELDS.search(name):
            event[name] = "[redacted]"
        elif isinstance(value, str):
            event[name] = redact(value)
        elif not isinstance(value, bool | int | float | None):
            event[name] = redact(repr(value))
    return event


def _dumps(event: Any, **_: Any) -> str:
    return orjson.dumps(event).decode()
