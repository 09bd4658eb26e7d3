"""The route class of this dialect: every request is signed, and its paths and shapes are those of botocore's models."""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError

from gateway.auth.keys import holder, require
from gateway.core.errors import GatewayError, Unauthenticated
from gateway.core.payloads import OperationKind
from gateway.core.principals import Principal, Scope
from gateway.wire.bodies import StrictRequest, parse_json
from gateway.wire.routes import DialectRoute
from gateway.wire.sagemaker.checks import checked
from gateway.wire.sagemaker.models import RUNTIME, Document, Shape, service
from gateway.wire.sagemaker.names import turn_of
from gateway.wire.sagemaker.signing import Signed, check_signature, read_signature, unknown_caller
from gateway.wire.turns import note

KINDS: Mapping[str, OperationKind] = {
    "forward": OperationKind.FORWARD,
    "forwardBackward": OperationKind.FORWARD_BACKWARD,
    "optimizerStep": OperationKind.OPTIM_STEP,
    "saveWeights": OperationKind.SAVE_WEIGHTS,
    "saveState": OperationKind.SAVE_STATE,
    "loadState": OperationKind.LOAD_STATE,
}
_SEQ = re.compile(rb'"sequenceNumber"\s*:\s*(\d{1,19})\b')
_KIND = re.compile(rb'"operationConfig"\s*:\s*\{\s*"(\w+)"')


class SignedRoute(DialectRoute):
    """A route behind signature version 4. The body is left to the handler: it may be what strict JSON is not."""

    media_types = None

    async def identify(self, request: Request) -> Principal:
        now = request.state.clock.now()
        signed = read_signature(request.headers, now=now)
        request.state.signed = signed
        try:
            return await holder(request.state.keys, signed.key_id, at=now)
        except Unauthenticated:
            raise unknown_caller() from None

    async def verify(self, request: StrictRequest) -> None:
        signed: Signed = request.state.signed
        secret = request.state.keyring.secret(signed.key_id)
        await asyncio.to_thread(lambda: check_signature(signed, secret, request.scope, request.digest()))


class TurnRoute(SignedRoute):
    """A route whose requests carry a sequence number, which is noted when one is refused."""

    hears_excess = True

    async def too_large(self, request: StrictRequest) -> None:
        if request.excess is None:
            return
        await self.verify(request)
        require(request.state.principal, Scope.TRAIN)
        outline = request.excess.outline
        seq, kind = _SEQ.search(outline), _KIND.search(outline)
        if seq and kind and (name := kind[1].decode()) in KINDS:
            note(request, turn_of(request.path_params["trainingSessionName"], int(seq[1]), KINDS[name]))

    async def refused(self, request: StrictRequest, error: GatewayError | RequestValidationError) -> None:
        try:
            document = await asyncio.to_thread(parse_json, await request.body(), constants=True)
        except GatewayError:
            return
        fields = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        config, seq = fields.get("operationConfig"), fields.get("sequenceNumber")
        names = list(cast("dict[str, Any]", config)) if isinstance(config, dict) else []
        if len(names) == 1 and names[0] in KINDS and isinstance(seq, int) and not isinstance(seq, bool):
            note(request, turn_of(request.path_params["trainingSessionName"], seq, KINDS[names[0]]))


async def _asked(request: Request) -> Document:
    """Return what a runtime request asks, from its path, headers and body, checked against the model.

    Raises:
        Invalid: names the field.
    """
    shape = service(RUNTIME).operation(request.scope["route"].name).request
    placed: dict[str, Any] = {}
    for member, (place, name) in shape.locations.items():
        value = request.path_params[name] if place == "uri" else request.headers.get(name)
        if value is not None:
            placed[member] = value
    return await asyncio.to_thread(_parsed, shape, placed, await request.body())


def _parsed(shape: Shape, placed: Document, body: bytes) -> Document:
    document: Any = {}
    if shape.payload is not None:
        document = {shape.payload: body}
    elif body:
        document = parse_json(body, constants=True)
    if isinstance(document, dict):
        document = {**cast("dict[str, Any]", document), **placed}
    return cast("Document", checked(shape, document))


Asked = Annotated[Document, Depends(_asked)]
