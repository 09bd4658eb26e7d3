"""The application: builds what requests need for as long as it lives, and mounts the dialects."""

from asyncio import CancelledError, create_task
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import structlog
from fastapi import FastAPI

from billing.prices import PriceList, shipped_prices
from gateway import health
from gateway.auth.keys import Keyring, local_key
from gateway.auth.master import open_keyring
from gateway.background import Sweeper
from gateway.collector import Collector
from gateway.core.catalog import Catalog, parse_catalog
from gateway.core.clock import Clock, SystemClock
from gateway.core.futures import Futures
from gateway.engines.pool import EnginePool
from gateway.processes import own_name
from gateway.publisher import Publisher
from gateway.settings import Settings
from gateway.store import SERVER_WAIT_S, LocalArtifacts, open_database
from gateway.wire.deps import State
from gateway.wire.edge import RequestEdge
from gateway.wire.idempotency import FirstAnswers
from gateway.wire.native import errors as native_errors
from gateway.wire.native.app import create_native_app
from gateway.wire.openai.app import create_openai_app


class AppState(State):
    """The dialects' state, and what only the application's own routes need."""

    readiness: health.Readiness


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[AppState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the gateway reads once, before it starts."""

    keyring: Keyring
    catalog: Catalog
    prices: PriceList


def read_files(settings: Settings, *, at: datetime) -> Files:
    """Read the master key (made on first start), the catalogue, and the price list, which must cover it.

    Raises:
        MasterKeyError, CatalogError, PriceListError, OSError: the message says which file is wrong, and how.
    """
    catalog = parse_catalog(settings.resolved_catalog.read_text(encoding="utf-8"))
    prices = PriceList.load(settings.prices or shipped_prices())
    prices.check_covers(catalog.models, at=at)
    return Files(keyring=open_keyring(settings), catalog=catalog, prices=prices)


def create_app(settings: Settings) -> FastAPI:
    """Return the application for ``settings``. Its files are read now, everything else is opened by its lifespan.

    Raises:
        MasterKeyError, CatalogError, PriceListError, OSError: see ``read_files``.
    """
    clock = SystemClock()
    app = FastAPI(
        title="Loopline",
        lifespan=_lifespan(settings, read_files(settings, at=clock.now()), clock),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    native_errors.install(app)
    app.router.routes.extend(health.ROUTES)
    app.mount("/training/v1", create_native_app())
    app.mount("/v1", create_openai_app())
    app.add_middleware(RequestEdge)
    return app


def _lifespan(settings: Settings, files: Files, clock: Clock) -> Lifespan:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[AppState]:
        async with AsyncExitStack() as opened:
            yield await _open(settings, files, clock, opened)

    return lifespan


async def _open(settings: Settings, files: Files, clock: Clock, opened: AsyncExitStack) -> AppState:
    """Open everything in the order of dependence; ``opened`` closes it in the reverse order."""
    keyring, catalog = files.keyring, files.catalog
    database = await opened.enter_async_context(
        open_database(
            settings.resolved_database_url,
            blob_dir=settings.blob_dir,
            clock=clock,
            wait_s=SERVER_WAIT_S,
            allow_weak_durability=settings.allow_weak_durability,
        )
    )
    engines = await opened.enter_async_context(
        EnginePool(
            catalog,
            LocalArtifacts(settings.artifact_dir),
            key=settings.engine_key.get_secret_value(),
            timeout_s=settings.engine_timeout_s,
        )
    )
    futures = await opened.enter_async_context(Futures(database, database.wakeups, lambda unit: unit.operations))
    score_futures = await opened.enter_async_context(Futures(database, database.wakeups, lambda unit: unit.scores))
    owner = own_name()
    await opened.enter_async_context(Publisher(database, engines, database.wakeups, clock, owner))
    await opened.enter_async_context(_running(Sweeper(database, clock, gap_timeout_s=settings.gap_timeout_s)))
    collector = Collector(database, LocalArtifacts(settings.artifact_dir), clock, owner)
    await opened.enter_async_context(_running(collector))
    async with database.write() as unit:
        await local_key(unit, keyring, at=clock.now())
    structlog.stdlib.get_logger("gateway.app").info("ready", base_models=sorted(catalog.models), owner=owner)
    return AppState(
        database=database,
        engines=engines,
        futures=futures,
        score_futures=score_futures,
        catalog=catalog,
        prices=files.prices,
        clock=clock,
        keyring=keyring,
        first_answers=FirstAnswers(),
        max_body_bytes=settings.max_body_bytes,
        readiness=health.Readiness(database, engines, catalog, clock),
    )


@asynccontextmanager
async def _running(task_of: Sweeper | Collector) -> AsyncGenerator[None]:
    task = create_task(task_of.run(), name=type(task_of).__name__.lower())
    try:
        yield
    finally:
        task.cancel()
        with suppress(CancelledError):
            await task
