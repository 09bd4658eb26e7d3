"""Engines that answer, and what their answers cost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from gateway.core.catalog import BaseModel
from gateway.core.ids import VersionId
from gateway.core.sampling import EngineAnswer, Generation, SampleRequest, Target, TokenCounts
from gateway.core.versions import CanaryReport, Check, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine replica as the pool sees it."""

    url: str
    ready: bool
    adapters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """The Prometheus text of the engine at ``url``."""

    url: str
    base_model: str
    text: str


class Engines(Protocol):
    """All engines of all base models. Versions are loaded on demand through the gate, under never-reused names.

    Every method raises Unavailable (retryable) when the engine is away or dies midway, and Invalid when the engine
    refuses the request; no answer is ever computed by other weights than the target's.
    """

    async def generate(self, target: Target, request: SampleRequest, stop: asyncio.Event | None = None) -> Generation:
        """Sample. Setting ``stop`` aborts the engine's work. Raises Stopped then, with what it had done."""
        ...

    async def complete(
        self, target: Target, route: str, body: Mapping[str, Any], stop: asyncio.Event | None = None
    ) -> EngineAnswer:
        """POST an OpenAI body (without ``model``) to the engine's ``/v1/{route}`` and return its JSON answer. ``stop``
        as in ``generate``."""
        ...

    def stream(
        self, target: Target, route: str, body: Mapping[str, Any], stop: asyncio.Event
    ) -> AsyncIterator[EngineAnswer]:
        """As ``complete``, streamed: yields the decoded JSON chunks. Setting ``stop`` aborts the engine's work; the
        chunks go on to the one that holds its last count."""
        ...

    async def most_tokens(self, target: Target, body: Mapping[str, Any]) -> int:
        """Return a number that the tokens of a body's one prompt do not exceed, where it can be told without asking
        an engine, else how many they are."""
        ...

    async def tokenize(self, target: Target, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids the engine would see for an OpenAI chat or completion body."""
        ...

    async def verify(self, version: Version) -> Sequence[Check]:
        """Take a published version through the gate again on every engine, whether or not it is loaded there.

        Raises:
            Unavailable: no engine could be asked.
        """
        ...

    def share(self, among: int) -> None:
        """So many gateways, this one among them, use the engines: their slots are divided evenly."""
        ...

    def in_use(self, version: Version) -> bool:
        """Say whether a request of this process works with the version or waits for its turn."""
        ...

    async def held(self) -> frozenset[str]:
        """Return the versions (ids) whose files an engine may read again; one that is away holds none."""
        ...

    async def release(self, version: Version) -> bool:
        """Unload a version that is refused to new requests; return whether no engine can read its files any more, as
        far as this process knows."""
        ...

    async def publish(self, version: Version) -> CanaryReport:
        """Load ``version`` in every engine that must serve it and judge its canary there.

        Raises:
            CanaryMismatch, CorruptArtifact: the version must be rejected.
            Unavailable: try again later.
        """
        ...

    async def health(self, base: BaseModel) -> Sequence[EngineHealth]: ...

    async def metrics(self) -> Sequence[EngineMetrics]:
        """Return what each engine that answers says of itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Work that the gateway gives an engine on its own account, and the most that the engine may count for it."""

    engine: str
    base_model: str
    version_id: VersionId | None
    prompt_tokens: int
    sample_tokens: int


class Probes(Protocol):
    """Keeps account of probes, so that the engines' counters can be explained to the token."""

    def probing(self, probe: Probe) -> AbstractAsyncContextManager[Callable[[TokenCounts], None]]:
        """Announce a probe; what the yielded function hears is recorded at the end."""
        ...


class Prices(Protocol):
    """Prices usage; implemented by billing."""

    def cost_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        """Return the price in nano-USD. Raises KeyError when no price is valid then: never a silent zero."""
        ...

    def most_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        """Return the highest price that work begun at ``at`` can have, rounded up. Raises KeyError as above."""
        ...
