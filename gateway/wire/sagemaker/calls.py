"""A call of the control plane, as its handlers take it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request

from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Invalid
from gateway.core.ids import ProjectId
from gateway.core.ports import Artifacts, Database, UnitOfWork
from gateway.core.principals import Principal
from gateway.wire.deps import note_change
from gateway.wire.sagemaker.models import Document

PAGE = 100  # entries of a list where a request does not say how many

_NAMES = ("TrainingSessionName", "ModelPackageGroupName", "ModelPackageName")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked (checked against botocore's model), by whom, and what answers need."""

    asked: Document
    principal: Principal
    catalog: Catalog
    clock: Clock
    artifacts: Artifacts
    database: Database
    request: Request

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[UnitOfWork]:
        """Open a unit of work whose change the audit log tells of."""
        async with self.database.write() as unit:
            yield unit
            named = ", ".join(f"{name}={self.asked[name]}" for name in _NAMES if name in self.asked)
            action = f"POST /sagemaker {self.request.headers['x-amz-target']}"
            await note_change(unit, self.request, action=action, subject=named)

    @property
    def project_id(self) -> ProjectId:
        return self.principal.project_id

    @property
    def page_size(self) -> int:
        size: int = self.asked.get("MaxResults", PAGE)
        return size

    def refuse(self, *members: str) -> None:
        """Raise when a member is given that has no meaning here.

        Raises:
            Invalid: ``unsupported_field``.
        """
        for member in members:
            if self.asked.get(member) is not None:
                raise Invalid(f"{member} is not offered here", code="unsupported_field", field=member)
