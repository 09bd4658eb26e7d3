"""The control plane: one path, the operation in a header. Everything is dispatched from here."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, Request, Response

from gateway.auth.keys import require
from gateway.core.errors import Invalid
from gateway.core.principals import Scope
from gateway.wire.bodies import parse_json
from gateway.wire.deps import Caller, CatalogDep, ClockDep, DatabaseDep
from gateway.wire.sagemaker import hub, packages, sessions
from gateway.wire.sagemaker.calls import Call
from gateway.wire.sagemaker.checks import checked
from gateway.wire.sagemaker.models import CONTROL, Document, Operation, service
from gateway.wire.sagemaker.routes import SignedRoute
from gateway.wire.sagemaker.writing import answered

MEDIA_TYPE = "application/x-amz-json-1.1"
_PREFIX = "SageMaker."

Handler = Callable[[Call], Awaitable[Document]]

HANDLERS: Mapping[str, tuple[Handler, Scope | None]] = {  # and the scope that a key needs for it
    "CreateTrainingSession": (sessions.create, Scope.TRAIN),
    "DescribeTrainingSession": (sessions.describe, None),
    "ListTrainingSessions": (sessions.list_page, None),
    "StopTrainingSession": (sessions.stop, Scope.TRAIN),
    "DeleteTrainingSession": (sessions.delete, Scope.TRAIN),
    "CreateModelPackageGroup": (packages.create_group, Scope.TRAIN),
    "DescribeModelPackageGroup": (packages.describe_group, None),
    "ListModelPackages": (packages.list_page, None),
    "DescribeModelPackage": (packages.describe, None),
    "DeleteModelPackage": (packages.delete, Scope.TRAIN),
    "ListHubContents": (hub.list_page, None),
    "DescribeHubContent": (hub.describe, None),
}

router = APIRouter(route_class=SignedRoute)


@router.post("/")
async def control_plane(
    request: Request,
    principal: Caller,
    catalog: CatalogDep,
    clock: ClockDep,
    database: DatabaseDep,
) -> Response:
    """Dispatch by ``X-Amz-Target``."""
    target = request.headers.get("x-amz-target", "")
    name = target.removeprefix(_PREFIX)
    if not target.startswith(_PREFIX) or name not in HANDLERS:
        raise Invalid(f"operation {target[:80]!r} is not offered here", code="unknown_operation", field="X-Amz-Target")
    handle, scope = HANDLERS[name]
    if scope is not None:
        require(principal, scope)
        request.state.allowance, request.state.headers = await request.state.limiter.admit(principal)
    operation = service(CONTROL).operation(name)
    call = Call(
        asked=await asyncio.to_thread(_parsed, operation, await request.body()),
        principal=principal,
        catalog=catalog,
        clock=clock,
        artifacts=request.state.artifacts,
        database=database,
        request=request,
    )
    return answered(operation, await handle(call), media_type=MEDIA_TYPE)


def _parsed(operation: Operation, body: bytes) -> Document:
    document: Document = checked(operation.request, parse_json(body) if body else {})
    return document
