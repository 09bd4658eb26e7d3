"""Short ways to what the ledger's tests do."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection, text

from billing import poster, price_book
from billing.database import is_postgres, reading
from billing.moments import micros
from billing.reconcile import Report, reconcile
from gateway.core.ids import KeyId, ProjectId, SessionId
from gateway.core.ledger import WorstCase
from gateway.core.usage import Meter, UsageFact
from gateway.ledger import PriceSheet
from gateway.store import SqlDatabase
from tests.store.bench import BASE, Bench, HandClock, open_bench

T = TypeVar("T")
OWNER = "gateway-a"
RATES = {"prefill": 20_000_000, "cached_prefill": 5_000_000, "sample": 60_000_001, "train": 120_000_000}
PRICES = f'[[price]]\nbase_model = "{BASE}"\nfrom = 2025-01-01T00:00:00Z\nstorage = 100_000_000\n' + "".join(
    f"{meter} = {rate}\n" for meter, rate in RATES.items()
)


@dataclass(kw_only=True)
class Books:
    """Each method is one transaction."""

    database: SqlDatabase
    clock: HandClock
    url: str
    bench: Bench
    sheet: PriceSheet

    @property
    def project_id(self) -> ProjectId:
        return self.bench.project_id

    @property
    def key_id(self) -> KeyId:
        return self.bench.key_id

    @property
    def now(self) -> int:
        return micros(self.clock.now())

    async def add(self, *facts: UsageFact) -> None:
        async with self.database.write() as unit:
            await unit.usage.add(facts)

    def fact(
        self,
        source: str,
        quantity: int = 5,
        meter: Meter = Meter.SAMPLE,
        *,
        at: datetime | None = None,
        session_id: str | None = None,
        tag: str | None = None,
        project_id: ProjectId | None = None,
        engine: str | None = None,
        base_model: str = BASE,
    ) -> UsageFact:
        return UsageFact(
            source=source,
            meter=meter,
            quantity=quantity,
            project_id=project_id or self.project_id,
            key_id=self.key_id,
            session_id=None if session_id is None else SessionId(session_id),
            version_id=None,
            base_model=base_model,
            at=at or self.clock.now(),
            tag=tag,
            engine=engine,
        )

    async def post(self, *, limit: int = poster.BATCH) -> poster.Posted:
        at = self.now
        return await self.database.change(lambda connection: poster.post(connection, at=at, limit=limit))

    async def post_all(self) -> int:
        done = 0
        while (posted := await self.post()).postings:
            done += posted.postings
        return done

    async def hold(self, source: str, *, sampled: int = 0, trained: int = 0, session_id: str | None = None) -> None:
        async with self.database.write(durable=False) as unit:
            await unit.ledger.hold(self.worst_case(source, sampled=sampled, trained=trained, session_id=session_id))

    def worst_case(
        self, source: str, *, sampled: int = 0, trained: int = 0, session_id: str | None = None
    ) -> WorstCase:
        return WorstCase(
            source=source,
            project_id=self.project_id,
            key_id=self.key_id,
            session_id=None if session_id is None else SessionId(session_id),
            base_model=BASE,
            sampled=sampled,
            trained=trained,
            engine_sampled=sampled,
            ours=not trained,
        )

    async def look(self, work: Callable[[Connection], T]) -> T:
        return await self.database.look(work)

    def report(self) -> Report:
        with reading(self.url) as connection:
            return reconcile(connection)


async def open_books(database: SqlDatabase, clock: HandClock, url: str, sheet: PriceSheet) -> Books:
    bench = await open_bench(database, clock)
    at = clock.now()
    sheet.book = await database.change(lambda connection: price_book.apply(connection, PRICES, at=at))
    async with database.write() as unit:
        await unit.keys.ensure_house()
    return Books(database=database, clock=clock, url=url, bench=bench, sheet=sheet)


def disarm(connection: Connection) -> None:
    """Switch the append-only triggers off for this transaction: what somebody with the database's password can do."""
    if is_postgres(connection):
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        return
    for (name,) in connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).all():
        connection.execute(text(f"DROP TRIGGER {name}"))
