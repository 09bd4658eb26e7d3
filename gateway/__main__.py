"""``python -m gateway``: read the settings and serve until told to stop."""

import gc
import signal
from socket import socket
from types import FrameType

import structlog
import uvicorn

from billing.prices import PriceListError
from gateway import logs
from gateway.app import Bookkeeping, create_app
from gateway.auth.master import MasterKeyError
from gateway.core.catalog import CatalogError
from gateway.departure import Departure
from gateway.ledger import ledger_factory
from gateway.settings import Settings
from gateway.traces import TracesUnavailable

GRACE_S = 10
KEEP_ALIVE_S = 30


def main(keeps: Bookkeeping = ledger_factory) -> int:
    """Return the exit status: 0 after a clean stop, 2 when a file is missing or wrong. ``keeps`` is the ledger."""
    settings = Settings()
    logs.configure()
    try:
        app = create_app(settings, keeps=keeps)
    except (CatalogError, PriceListError, MasterKeyError, TracesUnavailable, OSError) as error:
        structlog.stdlib.get_logger("gateway").error("gateway_not_started", reason=str(error))
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    server = _Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        ),
        app.state.departure,
    )
    server.run()
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Answers long polls at once when it is told to stop; otherwise they would take the whole grace."""

    def __init__(self, config: uvicorn.Config, departure: Departure) -> None:
        super().__init__(config)
        self._departure = departure

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: collections need not walk over it while somebody waits

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._departure.leave()
        super().handle_exit(sig, frame)


def _end(_number: int, _frame: FrameType | None) -> None:
    """uvicorn takes the signals while it serves, and sends itself the one that ended it again when it is done."""
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main())
