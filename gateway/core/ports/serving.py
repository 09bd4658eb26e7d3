"""Engines that answer, and what their answers cost."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from gateway.core.catalog import BaseModel
from gateway.core.sampling import Generation, SampleRequest, Target
from gateway.core.versions import CanaryReport, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine replica as the pool sees it."""

    url: str
    ready: bool
    adapters: int


class Engines(Protocol):
    """All engines of all base models. Versions are loaded on demand through the gate, under never-reused names.

    Every method raises Unavailable (retryable) when the engine is away or dies midway, and Invalid when the engine
    refuses the request; no answer is ever computed by other weights than the target's.
    """

    async def generate(self, target: Target, request: SampleRequest) -> Generation: ...

    async def complete(self, target: Target, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an OpenAI body (without ``model``) to the engine's ``/v1/{route}`` and return its JSON answer."""
        ...

    def stream(self, target: Target, route: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """As ``complete``, streamed: yields the decoded JSON chunks. Closing the iterator aborts the engine's work."""
        ...

    async def tokenize(self, target: Target, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids the engine would see for an OpenAI chat or completion body."""
        ...

    async def publish(self, version: Version) -> CanaryReport:
        """Load ``version`` in every engine that must serve it and judge its canary there.

        Raises:
            CanaryMismatch, CorruptArtifact: the version must be rejected.
            Unavailable: try again later.
        """
        ...

    async def health(self, base: BaseModel) -> Sequence[EngineHealth]: ...


class Prices(Protocol):
    """Prices usage; implemented by billing."""

    def cost_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        """Return the price in nano-USD. Raises KeyError when no price is valid then: never a silent zero."""
        ...
