"""Clients: programs that open sessions and samplers together, and say that they are alive.

A client's sessions, samplers and custom losses are numbered by the client itself, from 0, so that it may repeat a
request whose answer it lost. The number is part of their address: ``client-...:train:0`` is a session,
``client-...:sample:0`` a sampler, ``client-...:loss:0`` a custom loss.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from gateway.core.errors import Conflict
from gateway.core.ids import ClientId, KeyId, OperationId, ProjectId, SessionId, VersionId

LIVES = timedelta(minutes=10)  # after its last sign of life, what a client's samplers stay with is in use

_ADDRESS = re.compile(r"(client-[0-9a-z]{26}):(train|sample|loss):(0|[1-9][0-9]{0,8})", re.ASCII)


class Finish(StrEnum):
    """How a client said that it ended."""

    SUCCESS = "success"
    ERRORED = "errored"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client as recorded. ``finish`` and ``detail`` are its own words about its end."""

    id: ClientId
    project_id: ProjectId
    key_id: KeyId
    name: str | None
    tags: Sequence[str]
    user_metadata: Mapping[str, str]
    created_at: datetime
    seen_at: datetime
    finished_at: datetime | None
    finish: Finish | None
    detail: str | None

    def require_running(self) -> None:
        """Raise unless the client may open something.

        Raises:
            Conflict: ``client_finished``.
        """
        if self.finished_at is not None:
            raise Conflict(f"{self.id} has finished; it opens nothing more", code="client_finished", field="session_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A client's own number for one of its sessions, samplers or losses: at most one of each kind sits there."""

    client_id: ClientId
    number: int

    @property
    def session_address(self) -> str:
        return f"{self.client_id}:train:{self.number}"

    @property
    def loss_address(self) -> str:
        return f"{self.client_id}:loss:{self.number}"

    @property
    def sampler_address(self) -> str:
        return f"{self.client_id}:sample:{self.number}"


def parse_session_address(text: str) -> Seat | None:
    """Split ``client-...:train:n``; return None when ``text`` is not of that form."""
    return _seat(text, "train")


def parse_loss_address(text: str) -> Seat | None:
    """Split ``client-...:loss:n``; return None when ``text`` is not of that form."""
    return _seat(text, "loss")


def parse_sampler_address(text: str) -> Seat | None:
    """Split ``client-...:sample:n``; return None when ``text`` is not of that form."""
    return _seat(text, "sample")


def _seat(text: str, kind: str) -> Seat | None:
    match = _ADDRESS.fullmatch(text)
    if match is None or match[2] != kind:
        return None
    return Seat(client_id=ClientId(match[1]), number=int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A client's handle on weights that answer.

    It is pinned to ``version_id``, or to the version that the save ``operation_id`` makes, or it follows the latest
    version of ``session_id``, or (all three None) it is the base model. ``copies`` counts the processes that joined.
    """

    seat: Seat
    project_id: ProjectId
    base_model: str
    version_id: VersionId | None
    operation_id: OperationId | None
    session_id: SessionId | None
    copies: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLoss:
    """A custom loss that a client made; the blob ``document_digest`` holds its document."""

    seat: Seat
    project_id: ProjectId
    document_digest: str
    created_at: datetime
