"""OpenAI's own bodies, answered by the OpenAI dialect with a session's weights.

The other dialect is called in this process, as the same caller, with the model filled in. Its answer, or its stream,
goes back as it is; its refusals are told in this dialect's words.
"""

from collections.abc import Mapping
from typing import Any, cast

import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth.keys import Keyring
from gateway.core.errors import GatewayError, Invalid, Kind
from gateway.core.ledger import OutOfBudget
from gateway.wire.bodies import parse_json
from gateway.wire.deps import CatalogDep, ClockDep, DatabaseDep, EnginesDep, InferenceCaller
from gateway.wire.sagemaker.models import RUNTIME, service
from gateway.wire.sagemaker.names import find_training_session
from gateway.wire.sagemaker.routes import Asked, SignedRoute
from gateway.wire.sagemaker.targets import target_of

_PATH = "/chat/completions"
_KINDS: Mapping[int, Kind] = {
    401: Kind.UNAUTHENTICATED,
    403: Kind.FORBIDDEN,
    404: Kind.NOT_FOUND,
    429: Kind.EXHAUSTED,
    503: Kind.UNAVAILABLE,
}


def passthrough_routes(openai: ASGIApp) -> APIRouter:
    """Return the two routes of botocore's model that pass a chat completion on to ``openai``."""
    router = APIRouter(route_class=SignedRoute)
    sample = service(RUNTIME).operation("SampleTrainingSession")
    stream = service(RUNTIME).operation("SampleTrainingSessionWithResponseStream")

    async def pass_on(
        asked: Asked,
        request: Request,
        principal: InferenceCaller,
        database: DatabaseDep,
        engines: EnginesDep,
        catalog: CatalogDep,
        clock: ClockDep,
    ) -> Response:
        """Chat with a session's weights, in OpenAI's own words."""
        async with database.read() as unit:
            session = await find_training_session(unit, principal.project_id, asked["trainingSessionName"])
        ports = (database, engines, catalog, clock)
        target = await target_of(*ports, session, asked.get("modelPackageArn"), field="modelPackageArn")
        model = target.base.name if target.version is None else target.version.address
        request.state.asking_session = session
        body = _with_model(asked["body"], model, streamed=request.scope["route"].name == stream.name)
        keyring: Keyring = request.state.keyring
        return _Relay(openai, body, keyring.text(principal.key_id))

    for operation in (sample, stream):
        router.add_api_route(operation.path, pass_on, methods=[operation.method], name=operation.name)
    return router


def _with_model(raw: bytes, model: str, *, streamed: bool) -> bytes:
    document = parse_json(raw) if raw else None
    if not isinstance(document, dict):
        raise Invalid("the body must be a chat completion as JSON", field="body")
    asked = cast("dict[str, Any]", document)
    if asked.get("stream", streamed) is not streamed:
        raise Invalid(
            "stream does not fit the operation: SampleTrainingSession answers in one piece, "
            "SampleTrainingSessionWithResponseStream in a stream",
            field="stream",
        )
    return orjson.dumps({**asked, "model": model, "stream": streamed})


class _Relay(Response):
    """What another dialect's application answers to ``body`` and the key ``text``."""

    def __init__(self, app: ASGIApp, body: bytes, text: str) -> None:
        super().__init__()
        self._app = app
        self._asked = body
        self._headers = [
            (b"authorization", f"Bearer {text}".encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer.

        Raises:
            GatewayError: the other dialect refused.
        """
        pending = [{"type": "http.request", "body": self._asked, "more_body": False}]
        refused: list[bytes] = []
        status = 200

        async def read() -> Message:
            return pending.pop() if pending else await receive()

        async def write(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if status < 400:
                await send(message)
            elif message["type"] == "http.response.body":
                refused.append(message.get("body", b""))

        path = f"{scope['root_path']}{_PATH}"
        inner = {**scope, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": self._headers}
        await self._app(inner, read, write)
        if status >= 400:
            raise _refusal(status, b"".join(refused))


def _refusal(status: int, body: bytes) -> GatewayError:
    document: dict[str, Any] = orjson.loads(body)["error"]
    error = GatewayError(document["message"], code=document["code"], field=document["param"])
    if error.code == OutOfBudget.default_code:
        error.kind = Kind.OUT_OF_BUDGET
    else:
        error.kind = _KINDS.get(status, Kind.INVALID if status < 500 else Kind.INTERNAL)
    return error
