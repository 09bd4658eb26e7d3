"""The collector: throws away what nobody needs any more. One gateway at a time does it."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from gateway.core.clock import Clock
from gateway.core.ports import Database
from gateway.core.ports.collection import BlobName

LOCK = "collector"
INTERVAL_S = 60.0
LEASE_S = 300.0
PAGE = 100
ORPHAN_AGE_S = 24 * 3600.0  # nothing that is being written is older than this


class Directories(Protocol):
    """What the collector needs of the artefact store. The methods block."""

    def older_than(self, age_s: float) -> Sequence[str]:
        """Return the committed locations that were written longer ago."""
        ...

    def remove(self, location: str) -> None: ...

    def tidy(self, age_s: float) -> None:
        """Remove what was staged longer ago and never committed."""
        ...


class Collector:
    """Collects once a minute until cancelled. A round that fails is logged and tried again."""

    def __init__(self, database: Database, artifacts: Directories, clock: Clock, owner: str) -> None:
        self._database = database
        self._artifacts = artifacts
        self._clock = clock
        self._owner = owner
        self._log = structlog.stdlib.get_logger("gateway.collector")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                async with self._database.write() as unit:
                    mine = await unit.locks.hold(LOCK, owner=self._owner, lease_s=LEASE_S, at=self._clock.now())
                if mine:
                    await self.collect()
            except Exception:
                self._log.exception("collection_failed")

    async def collect(self) -> None:
        """Do one round."""
        async with self._database.write() as unit:
            locations = await unit.collection.forget_snapshots(PAGE)
            await unit.collection.forget_answers(self._clock.now())
        locations = [*locations, *await self._orphans()]
        for location in locations:
            await asyncio.to_thread(self._artifacts.remove, location)
        blobs = await self._collect_blobs()
        if locations or blobs:
            self._log.info("collected", artefacts=len(locations), blobs=blobs)

    async def _orphans(self) -> Sequence[str]:
        """Return old directories that no row names: their writer was lost before it could record them."""
        await asyncio.to_thread(self._artifacts.tidy, ORPHAN_AGE_S)
        old = await asyncio.to_thread(self._artifacts.older_than, ORPHAN_AGE_S)
        orphans: list[str] = []
        for start in range(0, len(old), PAGE):
            some = old[start : start + PAGE]
            async with self._database.read() as unit:
                known = await unit.collection.known(some)
            orphans += [location for location in some if location not in known]
        return orphans

    async def _collect_blobs(self) -> int:
        removed, after = 0, None
        while True:
            names, after = await self._unneeded(after)
            if names:
                async with self._database.write() as unit:
                    removed += await unit.collection.remove(names, at=self._clock.now())
            if after is None:
                return removed

    async def _unneeded(self, after: BlobName | None) -> tuple[Sequence[BlobName], BlobName | None]:
        async with self._database.read() as unit:
            return await unit.collection.unneeded(after=after, limit=PAGE, at=self._clock.now())
