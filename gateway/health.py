"""``/livez`` and ``/readyz``.

``/livez`` says that the process answers and depends on nothing. ``/readyz`` says whether work would succeed now:
database, one ready engine and a trainer with a fresh heartbeat for every base model; otherwise 503 with the reasons.
"""

import asyncio
import math
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clock import Clock
from gateway.core.errors import GatewayError
from gateway.core.ids import KeyId
from gateway.core.ports import Database, Engines

_PROBE = "readyz"
_TIMEOUT_S = 3.0
FRESH_S = 0.25


def trainer_lock(base_model: str) -> str:
    """Return the name of the lock that a base model's trainer holds while it is alive."""
    return f"trainer-{base_model}"


class Readiness:
    """Looks whether work would succeed now. Many askers share one look, which is at most ``FRESH_S`` old."""

    def __init__(self, database: Database, engines: Engines, catalog: Catalog, clock: Clock) -> None:
        self._database = database
        self._engines = engines
        self._models = list(catalog.models.values())
        self._clock = clock
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._reasons: Sequence[str] = ()

    async def reasons(self) -> Sequence[str]:
        """Return why work would not succeed now; empty when it would."""
        async with self._looking:
            if time.monotonic() - self._looked_at > FRESH_S:
                self._reasons = await self._look()
                self._looked_at = time.monotonic()
            return self._reasons

    async def _look(self) -> Sequence[str]:
        if not self._models:
            return ["the catalogue has no base model"]
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with self._database.read() as unit:
                    await unit.keys.get(KeyId(_PROBE))
                return [reason for model in self._models for reason in await self._of_model(model)]
        except TimeoutError:
            return [f"the checks took longer than {_TIMEOUT_S:g} s"]
        except GatewayError as error:
            return [error.message]

    async def _of_model(self, model: BaseModel) -> Sequence[str]:
        reasons: list[str] = []
        if not any(replica.ready for replica in await self._engines.health(model)):
            reasons.append(f"{model.name}: no engine is ready")
        if not await self._trainer_alive(model):
            reasons.append(f"{model.name}: no trainer has shown itself lately")
        return reasons

    async def _trainer_alive(self, model: BaseModel) -> bool:
        """A trainer keeps its lock leased; a lock that can be had, if only for no time, belongs to nobody."""
        async with self._database.write() as unit:
            lock = trainer_lock(model.name)
            return not await unit.locks.hold(lock, owner=_PROBE, lease_s=0.0, at=self._clock.now())


async def livez(_: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> JSONResponse:
    readiness: Readiness = request.state.readiness
    reasons = await readiness.reasons()
    if reasons:
        content = {"status": "not ready", "reasons": list(reasons)}
        return JSONResponse(content, status_code=503, headers={"Retry-After": "1"})
    return JSONResponse({"status": "ready", "reasons": []})


ROUTES = (Route("/livez", livez, methods=["GET"]), Route("/readyz", readyz, methods=["GET"]))
