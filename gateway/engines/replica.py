"""One engine as the pool uses it: its client, its turns, what it holds, whether it was lost."""

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from gateway.core.catalog import BaseModel
from gateway.core.ports import Artifacts, Probe, Probes
from gateway.core.sampling import TokenCounts
from gateway.core.versions import CanaryReport, Version
from gateway.engines import gate
from gateway.engines.answers import EngineLost
from gateway.engines.launch import CPU_LORAS_PER_SLOT
from gateway.engines.vllm import Vllm
from gateway.engines.vllm_adapters import LoadedVersions, Turns


class Unrecorded:
    """Probes that nobody keeps account of."""

    @asynccontextmanager
    async def probing(self, probe: Probe) -> AsyncGenerator[Callable[[TokenCounts], None]]:
        yield lambda counts: None


class Replica:
    """One engine and what is known of it."""

    def __init__(self, engine: Vllm, base: BaseModel, artifacts: Artifacts, probes: Probes) -> None:
        self.engine = engine
        self.base = base
        self.in_flight = 0
        self.lost = False
        self._artifacts = artifacts
        self._probes = probes
        self._turns = Turns(max(1, base.max_loras - 1))
        self.loaded = LoadedVersions(
            self._turns, capacity=CPU_LORAS_PER_SLOT * base.max_loras, unload=self.engine.unload_adapter
        )

    async def admit(self, version: Version) -> CanaryReport:
        """Load ``version`` through the gate unless it is here."""
        with self._watched():
            return await self.loaded.ensure(
                version.id, lambda: gate.admit(self.engine, version, self.base, self._artifacts, self._probes)
            )

    @asynccontextmanager
    async def serving(self, version: Version | None) -> AsyncGenerator[str]:
        """Hold what a request needs; yields the engine's name of the model."""
        self.in_flight += 1
        try:
            async with AsyncExitStack() as held:
                if version is not None:
                    await held.enter_async_context(self._turns.turn(version.id))
                    await self.admit(version)
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
