"""One engine as the pool uses it: its client, its turns, what it holds, whether it was lost."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import datetime

from gateway.core.canary import CanaryMismatch
from gateway.core.catalog import BaseModel
from gateway.core.errors import Conflict
from gateway.core.ids import VersionId
from gateway.core.ports import Artifacts, CorruptArtifact, Probe, Probes
from gateway.core.sampling import Target, TokenCounts
from gateway.core.versions import CanaryReport, Check, Occasion, Version
from gateway.engines import gate
from gateway.engines.answers import EngineLost
from gateway.engines.fair import FairGate
from gateway.engines.launch import CPU_LORAS_PER_SLOT
from gateway.engines.vllm import Vllm
from gateway.engines.vllm_adapters import LoadedVersions, Turns

QUIET_S = 5.0  # a request may be on its way into the engine, where it is not counted yet

Witness = Callable[[Version, Check], Awaitable[None]]


class Unrecorded:
    """Probes that nobody keeps account of."""

    @asynccontextmanager
    async def probing(self, probe: Probe) -> AsyncGenerator[Callable[[TokenCounts], None]]:
        yield lambda counts: None


class Replica:
    """One engine and what is known of it. ``witness`` hears every verdict of the gate."""

    def __init__(
        self,
        engine: Vllm,
        base: BaseModel,
        artifacts: Artifacts,
        probes: Probes,
        *,
        now: Callable[[], datetime],
        witness: Witness,
        sequences: int,
    ) -> None:
        self.engine = engine
        self.base = base
        self.in_flight = 0
        self.lost = False
        self.gate = FairGate(sequences)
        self._artifacts = artifacts
        self._probes = probes
        self._now = now
        self._witness = witness
        self._turns = Turns(max(1, base.max_loras - 1))
        self._asked: Counter[VersionId] = Counter()
        self._quiet_since: dict[VersionId, float] = {}
        self.loaded = LoadedVersions(
            self._turns, capacity=CPU_LORAS_PER_SLOT * base.max_loras, unload=self.engine.unload_adapter
        )

    def share(self, among: int) -> None:
        """So many gateways use the engine: use no more than this one's part of its slots, but one at least."""
        self._turns.resize(max(1, (self.base.max_loras - 1) // among))
        self.loaded.capacity = max(1, CPU_LORAS_PER_SLOT * self.base.max_loras // among)

    @property
    def versions_in_use(self) -> int:
        return self._turns.distinct

    async def admit(self, version: Version, occasion: Occasion) -> CanaryReport:
        """Load ``version`` through the gate unless it is here.

        Raises:
            CorruptArtifact, CanaryMismatch: it is not held; the witness has heard why.
            Unavailable: nothing is known about the version.
        """
        return await self._admit(version, occasion, [])

    async def verify(self, version: Version) -> Check:
        """Take ``version`` through the gate again, whether or not it is here. Raises Unavailable."""
        verdicts: list[Check] = []
        async with self._turns.turn(version.id, version.session_id):
            with suppress(CorruptArtifact, CanaryMismatch):
                await self._admit(version, Occasion.VERIFY, verdicts)
        return verdicts[0]

    async def _admit(self, version: Version, occasion: Occasion, verdicts: list[Check]) -> CanaryReport:
        async def tell(report: CanaryReport | None, failure: str | None) -> None:
            check = Check(
                version_id=version.id,
                engine=self.engine.url,
                occasion=occasion,
                at=self._now(),
                report=report,
                failure=failure,
            )
            verdicts.append(check)
            await self._witness(version, check)

        async def judged() -> CanaryReport:
            try:
                report = await gate.admit(self.engine, version, self.base, self._artifacts, self._probes)
            except (CorruptArtifact, CanaryMismatch) as error:
                await tell(None, str(error))
                raise
            await tell(report, None)
            return report

        with self._watched():
            return await self.loaded.ensure(version.id, judged, occasion)

    def in_use(self, version_id: VersionId) -> bool:
        """Say whether a call that was let in or waits here needs the version."""
        return self._asked[version_id] > 0 or self._turns.in_use(version_id)

    async def held(self) -> frozenset[str]:
        """Return the names that the engine answers to or still works with. Raises Unavailable."""
        return frozenset(await self.engine.models()) | await self.engine.adapters_in_work()

    async def release(self, version: Version) -> bool:
        """Unload a version that nobody may ask for any more; return whether the engine cannot read its files again.

        The engine keeps what it was told to unload while requests for it run, and reads the files again when it had to
        make room meanwhile. So it must say, twice and some seconds apart, that it works on none.
        """
        if self.in_use(version.id):
            return False
        with self._watched():
            await self.loaded.drop(version.id)
            if version.id in await self.engine.adapters_in_work():
                self._quiet_since.pop(version.id, None)
                return False
        since = self._quiet_since.setdefault(version.id, time.monotonic())
        if time.monotonic() - since < QUIET_S:
            return False
        del self._quiet_since[version.id]
        return True

    @asynccontextmanager
    async def turn(self, target: Target, *, sequences: int, tokens: int) -> AsyncGenerator[None]:
        """Wait for room for a call and hold it; its version is in use from the moment that it waits."""
        asked = None if target.version is None else target.version.id
        if asked is not None:
            self._asked[asked] += 1
        try:
            async with self.gate.turn(target.project_id, sequences=sequences, tokens=tokens):
                yield
        finally:
            if asked is not None:
                self._asked[asked] -= 1
                if not self._asked[asked]:
                    del self._asked[asked]

    @asynccontextmanager
    async def serving(self, version: Version | None) -> AsyncGenerator[str]:
        """Hold what a request needs; yields the engine's name of the model.

        Raises:
            Conflict: ``version_failed_check``: published once, but this engine does not compute it now. Permanent.
        """
        self.in_flight += 1
        try:
            async with AsyncExitStack() as held:
                if version is not None:
                    await held.enter_async_context(self._turns.turn(version.id, version.session_id))
                    try:
                        await self.admit(version, Occasion.LOAD)
                    except (CorruptArtifact, CanaryMismatch) as error:
                        raise Conflict(
                            f"{version.address} did not pass the publish gate again and is not served",
                            code="version_failed_check",
                        ) from error
                with self._watched():
                    yield self.base.name if version is None else version.id
        finally:
            self.in_flight -= 1

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        except EngineLost:
            self.lost = True
            self.loaded.forget_all()
            raise
        self.lost = False
