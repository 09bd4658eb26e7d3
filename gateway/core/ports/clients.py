"""The stores of one transaction that hold what clients opened."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from gateway.core.clients import Client, Finish, Sampler, Seat, StoredLoss
from gateway.core.ids import ClientId, OperationId, ProjectId, SessionId


class ClientStore(Protocol):
    """Clients, their samplers and their custom losses; their sessions are in SessionStore."""

    async def add(self, client: Client) -> None: ...

    async def get(self, project_id: ProjectId, client_id: ClientId) -> Client:
        """Raises NotFound."""
        ...

    async def page(self, project_id: ProjectId, *, limit: int, offset: int) -> Sequence[Client]:
        """Newest first."""
        ...

    async def seen(self, project_id: ProjectId, client_id: ClientId, at: datetime) -> Client:
        """Record a sign of life, which also counts as a use of its live sessions. Raises NotFound."""
        ...

    async def finish(
        self, project_id: ProjectId, client_id: ClientId, finish: Finish, detail: str | None, at: datetime
    ) -> Sequence[SessionId]:
        """Record the end, once, and return the client's live sessions. Raises NotFound."""
        ...

    async def add_sampler(self, sampler: Sampler) -> Sampler:
        """Add a sampler, or return the one that sits there already."""
        ...

    async def sampler(self, project_id: ProjectId, seat: Seat) -> Sampler:
        """Raises NotFound."""
        ...

    async def sampler_of_operation(self, operation_id: OperationId) -> Sampler | None: ...

    async def samplers(self, project_id: ProjectId, client_id: ClientId) -> Sequence[Sampler]:
        """By number."""
        ...

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        """Add a custom loss, or return the one that sits there already."""
        ...

    async def loss(self, project_id: ProjectId, seat: Seat) -> StoredLoss:
        """Raises NotFound."""
        ...

    async def join_sampler(self, project_id: ProjectId, seat: Seat) -> int:
        """Count one more process that uses the sampler, and return the count. Raises NotFound."""
        ...
