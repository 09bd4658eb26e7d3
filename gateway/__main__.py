"""``python -m gateway``: read the settings and serve until told to stop."""

import gc
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from socket import socket
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from billing.prices import PriceListError
from gateway import logs
from gateway.app import Bookkeeping, create_app
from gateway.auth.master import MasterKeyError
from gateway.core.catalog import CatalogError
from gateway.core.errors import Unavailable
from gateway.departure import Departure
from gateway.ledger import ledger_factory
from gateway.places import WrongSettings
from gateway.settings import Settings
from gateway.store import UnfitDatabase
from gateway.traces import TracesUnavailable

GRACE_S = 10
KEEP_ALIVE_S = 30
NOT_STARTED = 2
_REFUSED = (
    *(WrongSettings, CatalogError, PriceListError, MasterKeyError, TracesUnavailable, OSError),
    *(UnfitDatabase, Unavailable),
)


def main(keeps: Bookkeeping = ledger_factory) -> int:
    """Return the exit status: 0 after a clean stop, 2 when settings, a file or the database is wrong or away; a line in
    the log says which. ``keeps`` is the ledger.
    """
    logs.configure()
    try:
        settings = Settings.read()
        app = create_app(settings, keeps=keeps)
    except _REFUSED as error:
        return _not_started(error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    server = _Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        ),
        app,
    )
    server.run()
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Opens and closes the application itself: uvicorn would log a traceback where a line says what to do. Answers long
    polls at once when it is told to stop; otherwise they would take the whole grace.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._departure: Departure = app.state.departure
        self._application = app.router.lifespan_context(app)
        self._opened = AsyncExitStack()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self.lifespan.state.update(await self._open())
        try:
            await super().startup(sockets)
        except SystemExit:  # it cannot listen, and said why
            await self._opened.aclose()
            raise
        gc.collect()
        gc.freeze()  # what is there now stays: collections need not walk over it while somebody waits

    async def _open(self) -> Mapping[str, Any]:
        try:
            return await self._opened.enter_async_context(self._application) or {}
        except _REFUSED as error:
            raise SystemExit(_not_started(error)) from None

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await super().shutdown(sockets)
        if not self.force_exit:
            await self._opened.aclose()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._departure.leave()
        super().handle_exit(sig, frame)


def _not_started(error: Exception) -> int:
    structlog.stdlib.get_logger("gateway").error("gateway_not_started", reason=str(error))
    return NOT_STARTED


def _end(_number: int, _frame: FrameType | None) -> None:
    """uvicorn takes the signals while it serves, and sends itself the one that ended it again when it is done."""
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main())
