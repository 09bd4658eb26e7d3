"""Adapters and merged models that leave, and adapters that come."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from gateway.core.adapter_modules import lora_of
from gateway.core.bodies import Body
from gateway.core.opening import drawn_seed, new_session
from gateway.core.payloads import SaveWeights
from gateway.core.sessions import OrderRule
from gateway.core.submission import check_payload, submit
from gateway.core.versions import Labels, check_group_name
from gateway.wire.deps import (
    ArtifactsDep,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    IdempotencyKey,
    MaxImportBytes,
    PricesDep,
    TrainCaller,
    note_change,
)
from gateway.wire.downloads import ARCHIVE, links_to, mounted_at
from gateway.wire.idempotency import request_digest, reused
from gateway.wire.native.model_packages import of_group
from gateway.wire.native.render import operation_read
from gateway.wire.native.schemas.operations import OperationRead
from gateway.wire.native.schemas.transfers import ExportedFile, ExportRead, ImportQuery
from gateway.wire.routes import DialectRoute
from gateway.wire.uploads import MEDIA_TYPES, UploadRoute, receive

IMPORT_TTL_S = 3600  # of the session that an import leaves behind

router = APIRouter(route_class=DialectRoute, tags=["model packages"])
uploads = APIRouter(route_class=UploadRoute, tags=["model packages"])


@router.get("/model_packages/{group}/{reference}/export")
async def export_version(
    group: str,
    reference: str,
    request: Request,
    principal: TrainCaller,
    clock: ClockDep,
    database: DatabaseDep,
    artifacts: ArtifactsDep,
) -> ExportRead:
    """Return links to a version's files and to one archive of them; they need no key, and expire within the hour."""
    async with database.read() as unit:
        version = await of_group(unit, principal, group, reference)
    links = await links_to(version, artifacts, request.state.keyring, at=clock.now())
    base = mounted_at(request)
    return ExportRead(
        version=version.address,
        kind=version.kind,
        base_model=version.base_model,
        expires_at=links.expires_at,
        files=[
            ExportedFile(name=name, size_bytes=entry.size_bytes, sha256=entry.sha256, url=base + links.paths[name])
            for name, entry in links.files.items()
        ],
        archive=ExportedFile(
            name=f"{version.group}-{version.number}.tar",
            size_bytes=links.archive_bytes,
            sha256=None,
            url=base + links.paths[ARCHIVE],
        ),
    )


@uploads.post(
    "/model_packages/{group}/import",
    status_code=202,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in sorted(MEDIA_TYPES)},
        }
    },
)
async def import_adapter(
    group: str,
    query: Annotated[ImportQuery, Query()],
    request: Request,
    principal: TrainCaller,
    catalog: CatalogDep,
    clock: ClockDep,
    database: DatabaseDep,
    artifacts: ArtifactsDep,
    prices: PricesDep,
    limit_bytes: MaxImportBytes,
    idempotency_key: IdempotencyKey,
) -> OperationRead:
    """Make a version of a PEFT adapter: a tar of its two files. The save that is answered completes when it is served.

    A session of the adapter's rank and layers is opened for it, which expires within the hour.
    """
    model = catalog.get(query.base_model)
    labels = Labels(
        name=query.name, description=query.description, tags=tuple(sorted(query.tags)), ttl_s=query.ttl_seconds
    )
    check_payload(SaveWeights(group=check_group_name(group, field="group"), labels=labels), model)
    received = await receive(request, artifacts, limit_bytes=limit_bytes)
    asked = request_digest("import", f"{group} {query.model_dump_json()} {received.sha256}".encode())
    async with database.write() as unit:
        if idempotency_key is not None:
            known = await unit.sessions.by_idempotency_key(principal.project_id, idempotency_key)
            first = None if known is None else await unit.operations.by_seq(known[0].id, 1)
            if known is not None and (known[1] != asked or first is None):
                raise reused()
            if first is not None:  # what came now is nobody's, and collected as such
                return operation_read(first, (), prices)
        session = new_session(
            project_id=principal.project_id,
            key_id=principal.key_id,
            model=model,
            lora=lora_of(received.layout, seed=drawn_seed()),
            order=OrderRule.STRICT,
            at=clock.now(),
            group=group,
            ttl_s=IMPORT_TTL_S,
            user_metadata={"imported_sha256": received.sha256},
        )
        await note_change(unit, request)
        await unit.sessions.add(session, idempotency_key=idempotency_key, request_digest=asked)
        operation = await submit(
            unit,
            project_id=principal.project_id,
            key_id=principal.key_id,
            session_id=session.id,
            body=Body.of(SaveWeights(group=group, source=received.upload, labels=labels)),
        )
    return operation_read(operation, (), prices)


router.include_router(uploads)
