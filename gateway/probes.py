"""Keeps account of what the gateway asks of engines on its own account: facts of the house, at no price."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

from gateway.core.clock import Clock
from gateway.core.ids import KeyId, new_sample_id
from gateway.core.ledger import WorstCase
from gateway.core.ports import Database, Probe
from gateway.core.sampling import TokenCounts
from gateway.core.usage import HOUSE, house_facts


class RecordedProbes:
    """Probes whose counts are recorded before their result is used."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    @asynccontextmanager
    async def probing(self, probe: Probe) -> AsyncGenerator[Callable[[TokenCounts], None]]:
        """As the port says. A probe that fails half-way is a lost call beside what it did count."""
        heard: list[TokenCounts] = []
        work = WorstCase(
            source=new_sample_id(),
            project_id=HOUSE,
            key_id=KeyId(""),
            session_id=None,
            base_model=probe.base_model,
            engine_prompt=probe.prompt_tokens,
            engine_sampled=probe.sample_tokens,
            ours=True,
        )
        async with self._database.write(durable=False) as unit:
            await unit.ledger.hold(work)
        failed = True
        try:
            yield heard.append
            failed = False
        finally:
            with anyio.CancelScope(shield=True):
                await self._record(probe, work.source, heard, failed=failed)

    async def _record(self, probe: Probe, source: str, heard: list[TokenCounts], *, failed: bool) -> None:
        facts = house_facts(
            source=source,
            engine=probe.engine,
            prompt=sum(counts.extra_prompt for counts in heard),
            sampled=sum(counts.extra_sampled for counts in heard),
            base_model=probe.base_model,
            version_id=probe.version_id,
            at=self._clock.now(),
        )
        async with self._database.write() as unit:
            await unit.usage.add(facts)
            if failed:
                await unit.ledger.lose(source)
            else:
                await unit.ledger.settle(source, facts)
