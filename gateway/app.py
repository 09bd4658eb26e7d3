"""The application: builds what requests need for as long as it lives, and mounts the dialects."""

from asyncio import CancelledError, create_task, to_thread
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import structlog
from fastapi import FastAPI
from sqlalchemy import Connection
from starlette.routing import Route

from billing import price_book
from billing.price_book import Book
from billing.prices import PriceList, shipped_prices
from gateway import health, metrics
from gateway.auth.keys import Keyring, local_key
from gateway.auth.known import KnownKeys
from gateway.auth.master import open_keyring
from gateway.background import Sweeper
from gateway.biller import Biller
from gateway.collector import Collector
from gateway.core.catalog import Catalog, parse_catalog
from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import Unavailable
from gateway.core.futures import Futures
from gateway.core.tracing import Tracer
from gateway.departure import Departure
from gateway.engines.pool import EnginePool
from gateway.grammars.checker import GrammarChecker
from gateway.keeper import Keeper
from gateway.ledger import PriceSheet, ledger_factory
from gateway.metrics import Metrics
from gateway.probes import RecordedProbes
from gateway.processes import own_name
from gateway.publisher import Publisher
from gateway.scrapes import Scrapes
from gateway.settings import Settings
from gateway.store import SERVER_WAIT_S, SqlDatabase, open_database
from gateway.store.artifact_stores import open_artifacts
from gateway.store.object_store import ObjectArtifacts
from gateway.store.unit_of_work import LedgerFactory
from gateway.traces import open_tracer
from gateway.verdicts import Verdicts
from gateway.wire.deps import State
from gateway.wire.edge import RequestEdge
from gateway.wire.idempotency import FirstAnswers
from gateway.wire.limits import Limiter
from gateway.wire.native import errors as native_errors
from gateway.wire.native.app import create_native_app
from gateway.wire.openai.app import create_openai_app
from gateway.wire.sagemaker.app import AtMount, create_sagemaker_app
from gateway.wire.sampling_jobs import SamplingJobs
from gateway.wire.tinker.app import create_tinker_app


class AppState(State):
    """The dialects' state, and what only the application's own routes need."""

    readiness: health.Readiness
    metrics: Metrics
    scrapes: Scrapes
    answered: Callable[[str, int, float], None]


DIALECTS: Mapping[str, Callable[[], FastAPI]] = {
    "/training/v1": create_native_app,
    "/v1": create_openai_app,
    "/tinker": create_tinker_app,
}
SAGEMAKER = "/sagemaker"  # mounted beside them: it passes OpenAI's bodies on
Bookkeeping = Callable[[PriceSheet, Clock, str], LedgerFactory]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[AppState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the gateway reads once, before it starts."""

    keyring: Keyring
    catalog: Catalog
    prices: str


def read_files(settings: Settings, *, at: datetime) -> Files:
    """Read the master key (made on first start), the catalogue, and the price list, which must cover it.

    Raises:
        MasterKeyError, CatalogError, PriceListError, OSError: the message says which file is wrong, and how.
    """
    catalog = parse_catalog(settings.resolved_catalog.read_text(encoding="utf-8"))
    prices = (settings.prices or shipped_prices()).read_text(encoding="utf-8")
    PriceList.parse(prices).check_covers(catalog.models, at=at)
    return Files(keyring=open_keyring(settings), catalog=catalog, prices=prices)


def create_app(settings: Settings, *, keeps: Bookkeeping = ledger_factory) -> FastAPI:
    """Return the application for ``settings``. Its files are read now, everything else is opened by its lifespan.

    ``keeps`` gives transactions their ledger.

    Raises:
        MasterKeyError, CatalogError, PriceListError, OSError: see ``read_files``.
        TracesUnavailable: traces are wanted, and what sends them is not installed.
    """
    clock, departure = SystemClock(), Departure()
    files = read_files(settings, at=clock.now())
    tracer = open_tracer(wanted=settings.traces, service="loopline-gateway")
    app = FastAPI(
        title="Loopline",
        lifespan=_lifespan(settings, files, clock, departure, keeps, tracer),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.departure = departure
    native_errors.install(app)
    app.router.routes.extend([*health.ROUTES, *metrics.ROUTES])
    mounted = {mount: create() for mount, create in DIALECTS.items()}
    for mount, dialect in mounted.items():
        app.mount(mount, dialect)
    sagemaker = create_sagemaker_app(openai=mounted["/v1"])
    app.router.routes.append(Route(SAGEMAKER, AtMount(sagemaker), methods=["POST"]))
    app.mount(SAGEMAKER, sagemaker)
    app.add_middleware(RequestEdge, tracer=tracer)
    return app


def _lifespan(
    settings: Settings, files: Files, clock: Clock, departure: Departure, keeps: Bookkeeping, tracer: Tracer
) -> Lifespan:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[AppState]:
        async with AsyncExitStack() as opened:
            opened.push_async_callback(to_thread, tracer.close)
            yield await _open(settings, files, clock, departure, keeps, tracer, opened)

    return lifespan


async def _open(
    settings: Settings,
    files: Files,
    clock: Clock,
    departure: Departure,
    keeps: Bookkeeping,
    tracer: Tracer,
    opened: AsyncExitStack,
) -> AppState:
    """Open everything in the order of dependence; ``opened`` closes it in the reverse order."""
    keyring, catalog = files.keyring, files.catalog
    owner = own_name()
    sheet = PriceSheet(Book(number=0, digest="", prices=PriceList.parse(files.prices)))
    database = await opened.enter_async_context(
        open_database(
            settings.resolved_database_url,
            blob_dir=settings.blob_dir,
            clock=clock,
            wait_s=SERVER_WAIT_S,
            allow_weak_durability=settings.allow_weak_durability,
            create=True,
            ledger=keeps(sheet, clock, owner),
            limits=settings.limits,
        )
    )
    sheet.book = await _price_list(database, settings, files, at=clock.now())
    artifacts, collected = open_artifacts(settings), Metrics()
    engines = await opened.enter_async_context(
        EnginePool(
            catalog,
            artifacts,
            key=settings.engine_key.get_secret_value(),
            timeout_s=settings.engine_timeout_s,
            sequences=settings.engine_sequences,
            probes=RecordedProbes(database, clock),
            clock=clock,
            witness=Verdicts(database, collected),
            tracer=tracer,
        )
    )
    futures = await opened.enter_async_context(Futures(database, database.wakeups, lambda unit: unit.operations))
    score_futures = await opened.enter_async_context(Futures(database, database.wakeups, lambda unit: unit.scores))
    biller = Biller(database, engines, sheet, clock, owner)
    await opened.enter_async_context(_books(database, biller))
    sample_futures = await opened.enter_async_context(Futures(database, database.wakeups, lambda unit: unit.samples))
    waiters = (futures, score_futures, sample_futures)
    departure.tell(*(one.leave for one in waiters))
    jobs = await opened.enter_async_context(
        SamplingJobs(database, sample_futures, clock, owner, limit=settings.max_running_samples)
    )
    await opened.enter_async_context(Publisher(database, engines, database.wakeups, clock, owner))
    sweeper = Sweeper(
        database,
        engines,
        artifacts,
        clock,
        gap_timeout_s=settings.gap_timeout_s,
        undelete_s=settings.undelete_s,
    )
    await opened.enter_async_context(_running(sweeper))
    collector = Collector(database, artifacts, clock, owner)
    await opened.enter_async_context(_running(collector))
    if isinstance(artifacts, ObjectArtifacts):
        await opened.enter_async_context(_running(Keeper(engines, artifacts)))
    async with database.write() as unit:
        await local_key(unit, keyring, at=clock.now())
    structlog.stdlib.get_logger("gateway.app").info("ready", base_models=sorted(catalog.models), owner=owner)
    return AppState(
        database=database,
        engines=engines,
        grammars=await opened.enter_async_context(GrammarChecker()),
        futures=futures,
        score_futures=score_futures,
        catalog=catalog,
        prices=sheet,
        clock=clock,
        keyring=keyring,
        keys=KnownKeys(database),
        first_answers=FirstAnswers(),
        sampling_jobs=jobs,
        artifacts=artifacts,
        limiter=Limiter(database),
        max_body_bytes=settings.max_body_bytes,
        max_import_bytes=settings.max_import_bytes,
        undelete_s=settings.undelete_s,
        sagemaker_idle_s=settings.sagemaker_idle_s,
        metrics=collected,
        scrapes=Scrapes(database, engines, collected, clock, lambda: sum(one.waiting for one in waiters)),
        answered=lambda path, status, seconds: collected.answered(_dialect_of(path), status, seconds),
        readiness=health.Readiness(database, engines, catalog, clock),
    )


def _dialect_of(path: str) -> str:
    """Return the mount that a path is below; a path of nobody's must not become a label."""
    return next((mount for mount in (*DIALECTS, SAGEMAKER) if path == mount or path.startswith(f"{mount}/")), "other")


async def _price_list(database: SqlDatabase, settings: Settings, files: Files, *, at: datetime) -> Book:
    """Return the price list that counts: the one applied last, else (and when ``LOOPLINE_PRICES`` names a list that
    was never applied) the file's, which is applied now.

    Raises:
        PriceListError: the file changes prices of the past, or a base model has no price.
    """

    def applied(connection: Connection) -> Book:
        present = price_book.current_book(connection)
        known = price_book.was_applied(connection, files.prices)
        if present is None or (settings.prices is not None and not known):
            return price_book.apply(connection, files.prices, at=at)
        return present

    book = await database.change(applied)
    book.prices.check_covers(files.catalog.models, at=at)
    return book


@asynccontextmanager
async def _books(database: SqlDatabase, biller: Biller) -> AsyncGenerator[None]:
    """Keep the books; at the end post what is left and take leave."""
    async with database.write() as unit:
        await unit.keys.ensure_house()
    await biller.beat()
    async with _running(biller):
        yield
    with suppress(Unavailable):  # a gateway that comes later posts and releases what this one could not
        await biller.post()
        await biller.leave()


@asynccontextmanager
async def _running(task_of: Sweeper | Collector | Biller | Keeper) -> AsyncGenerator[None]:
    task = create_task(task_of.run(), name=type(task_of).__name__.lower())
    try:
        yield
    finally:
        task.cancel()
        with suppress(CancelledError):
            await task
