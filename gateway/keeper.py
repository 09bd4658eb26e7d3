"""Notes what engines hold as used, so that no process removes this machine's copies of it."""

import asyncio
from collections.abc import Collection
from typing import Protocol

import structlog

from gateway.core.ports import Engines

INTERVAL_S = 60.0


class Kept(Protocol):
    """What the keeper needs of the artefact store. The method blocks."""

    def note_use(self, version_ids: Collection[str]) -> None: ...


class Keeper:
    """Keeps once a minute until cancelled. An engine that is away holds nothing: what it is asked for next goes through
    the gate, which brings its files again."""

    def __init__(self, engines: Engines, artifacts: Kept) -> None:
        self._engines = engines
        self._artifacts = artifacts
        self._log = structlog.stdlib.get_logger("gateway.keeper")

    async def run(self) -> None:
        while True:
            try:
                await self.keep()
            except Exception:
                self._log.exception("keeping_failed")
            await asyncio.sleep(INTERVAL_S)

    async def keep(self) -> None:
        """Do one round."""
        await asyncio.to_thread(self._artifacts.note_use, await self._engines.held())
