"""The route classes of this dialect: the key comes in a header of its own, some bodies are protobuf, and some requests
take their turn in a model's order."""

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers

from gateway.auth.keys import require
from gateway.core.errors import GatewayError
from gateway.core.payloads import OperationKind
from gateway.core.principals import Scope
from gateway.wire.bodies import StrictRequest
from gateway.wire.routes import DialectRoute
from gateway.wire.tinker import protobuf
from gateway.wire.tinker.turns import turn, turn_of
from gateway.wire.turns import Turn, note

PROTOBUF = "application/x-protobuf"
_KINDS = {
    "optim_step": OperationKind.OPTIM_STEP,
    "save_weights": OperationKind.SAVE_STATE,
    "save_weights_for_sampler": OperationKind.SAVE_WEIGHTS,
    "save_weights_external": OperationKind.SAVE_WEIGHTS,
    "load_weights": OperationKind.LOAD_STATE,
}


class TinkerRoute(DialectRoute):
    """A route behind an ``X-API-Key``, with a strict JSON body."""

    @staticmethod
    def presented_key(headers: Headers) -> str | None:
        return headers.get("x-api-key")


class TurnRoute(TinkerRoute):
    """A route whose requests name a model and their turn, which is noted when one is refused."""

    async def refused(self, request: StrictRequest, error: GatewayError | RequestValidationError) -> None:
        note(request, await self._turn(request))

    async def _turn(self, request: StrictRequest) -> Turn | None:
        kind = _KINDS[request.url.path.rpartition("/")[2]]
        return turn_of(await request.json() if await request.body() else None, kind)


class ProtobufTurnRoute(TurnRoute):
    """A turn whose body is a batch in protobuf, plain or compressed."""

    media_types = frozenset({PROTOBUF})
    hears_excess = True

    async def too_large(self, request: StrictRequest) -> None:
        if request.excess is None:
            return
        require(request.state.principal, Scope.TRAIN)
        begins = protobuf.envelope(request.excess.head)
        if begins is not None:
            forward = request.excess.tail.endswith(protobuf.FORWARD_ONLY)
            note(request, turn(*begins, OperationKind.FORWARD if forward else OperationKind.FORWARD_BACKWARD))

    async def _turn(self, request: StrictRequest) -> Turn | None:
        try:
            submitted = protobuf.parse(await request.body())
        except GatewayError:
            return None
        kind = OperationKind.FORWARD if submitted.forward_only else OperationKind.FORWARD_BACKWARD
        return turn(submitted.model_id, submitted.seq_id, kind)
