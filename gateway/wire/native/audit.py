"""Who changed what in the project."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from gateway.wire.deps import AdminCaller, Reading
from gateway.wire.native.schemas.audit import AuditPage, AuditRead
from gateway.wire.native.schemas.base import PageQuery
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["audit"])


@router.get("/audit")
async def read_audit(query: Annotated[PageQuery, Query()], principal: AdminCaller, unit: Reading) -> AuditPage:
    """List who changed what in the project, newest first."""
    entries = await unit.audit.page(principal.project_id, limit=query.limit, after=query.after)
    return AuditPage(
        data=[AuditRead(**asdict(entry)) for entry in entries],
        next=entries[-1].id if len(entries) == query.limit else None,
    )
