"""Keeps the books: posts usage facts, releases the holds of dead processes, meters storage, compares engines.

Every gateway runs one. Posting, metering and comparing are leased, so that one gateway does them at a time; whoever
dies in between has left nothing half done, and another one goes on within seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
from sqlalchemy import Connection

from billing import engines, holds, poster, price_book, storage
from billing.facts import Fact
from billing.moments import DAY, micros, moment
from gateway.core.clock import Clock
from gateway.core.ids import KeyId, ProjectId, new_sample_id
from gateway.core.ports import Engines
from gateway.core.usage import Meter, UsageFact, house_facts
from gateway.ledger import PriceSheet
from gateway.processes import is_gone
from gateway.store import SqlDatabase

POST_EVERY_S = 2.0
COMPARE_EVERY_S = 10.0
METER_EVERY_S = 600.0
_LEASE_S = 15.0
_SETTLING_S = 2.0  # from the end of a call at its engine to its usage being recorded, at the very most


class Biller:
    """Runs until cancelled. A job that fails is logged and tried again at its next turn."""

    def __init__(self, database: SqlDatabase, pool: Engines, sheet: PriceSheet, clock: Clock, owner: str) -> None:
        self._database = database
        self._engines = pool
        self._sheet = sheet
        self._clock = clock
        self._owner = owner
        self._log = structlog.stdlib.get_logger("gateway.biller")
        self._unpriced: set[str] = set()
        self._compared: dict[str, engines.Counters] = {}

    async def run(self) -> None:
        """Do each job at its own pace."""
        async with asyncio.TaskGroup() as jobs:
            for job, every_s in (
                (self.beat, holds.HEARTBEAT_S),
                (self.post, POST_EVERY_S),
                (self.meter_storage, METER_EVERY_S),
                (self.compare_engines, COMPARE_EVERY_S),
            ):
                jobs.create_task(self._repeat(job, every_s))

    async def beat(self) -> None:
        """Say that this process lives, release what dead ones held, and divide the engines among the living."""
        now = micros(self._clock.now())

        def work(connection: Connection) -> tuple[int, Sequence[str]]:
            holds.beat(connection, self._owner, at=now)
            return len(holds.release_dead(connection, at=now)), holds.living(connection, at=now)

        released, living = await self._database.change(work, durable=False)
        self._engines.share(max(1, sum(not is_gone(owner) for owner in living)))
        if released:
            self._log.warning("holds of a dead gateway released", calls=released)

    async def leave(self) -> None:
        """Take leave in order: nobody needs to wait for this process's heartbeat to run out."""
        await self._database.change(lambda connection: holds.leave(connection, self._owner), durable=False)

    async def post(self) -> None:
        """Post what waits, all of it, and drop the holds of operations that ended without cost."""
        newest, waits = await self._database.look(
            lambda connection: (price_book.newest_number(connection), poster.anything_waits(connection))
        )
        if newest != self._sheet.book.number:
            await self._read_prices()
        if not waits or not await self._leads("poster"):
            return
        more = True
        while more:
            now = micros(self._clock.now())

            def work(connection: Connection, at: int = now) -> poster.Posted:
                posted = poster.post(connection, at=at)
                holds.release_ended(connection)
                return posted

            posted = await self._database.change(work)
            more = posted.more
            unpriced = {fact.source for fact in posted.unpriced}
            for source in sorted(unpriced - self._unpriced):
                self._log.error("usage has no price; it waits until a price list covers it", source=source)
            self._unpriced = unpriced

    async def meter_storage(self) -> None:
        """Record the storage facts of every day that is over and was not metered yet."""
        if not await self._leads("storage"):
            return
        today = storage.day_of(micros(self._clock.now()))
        first = await self._database.look(storage.first_unmetered_day)
        for day in range(first, today, DAY) if first is not None else ():
            facts = await self._database.look(lambda connection, day=day: storage.storage_facts(connection, day))
            async with self._database.write() as unit:
                await unit.usage.add([_storage_fact(fact) for fact in facts])

    async def compare_engines(self) -> None:
        """Compare the counters of every quiet engine with its facts."""
        if not await self._leads("engine counters"):
            return
        before = await self._counters()
        if not any(
            counters.unfinished == 0 and self._compared.get(url) != counters for url, (_, counters) in before.items()
        ):
            return
        await asyncio.sleep(_SETTLING_S)
        for url, (base_model, counters) in (await self._counters()).items():
            unchanged = before.get(url) == (base_model, counters)
            if unchanged and counters.unfinished == 0 and self._compared.get(url) != counters:
                await self._compare(url, base_model, counters)

    async def _counters(self) -> dict[str, tuple[str, engines.Counters]]:
        """Return base model and counters of each engine that says them."""
        read = [(one.url, one.base_model, engines.parse_counters(one.text)) for one in await self._engines.metrics()]
        return {url: (base_model, counters) for url, base_model, counters in read if counters is not None}

    async def _compare(self, url: str, base_model: str, counters: engines.Counters) -> None:
        def judge(connection: Connection) -> tuple[bool, engines.Verdict]:
            verdict = engines.judge(connection, url, base_model, counters)
            return holds.work_is_open(connection, base_model), verdict

        open_calls, verdict = await self._database.look(judge)
        if verdict.surplus.none:
            at = micros(self._clock.now())
            await self._database.change(
                lambda connection: engines.keep_reading(connection, url, base_model, counters, at=at)
            )
            self._compared[url] = counters
        elif open_calls:
            return  # perhaps calls of a gateway that died and still counts as alive: judged when that is known
        elif verdict.explained:
            async with self._database.write() as unit:
                await unit.usage.add(
                    house_facts(
                        source=f"{engines.LOST}{new_sample_id()}",
                        engine=url,
                        prompt=verdict.surplus.prompt,
                        sampled=verdict.surplus.generation,
                        base_model=base_model,
                        version_id=None,
                        at=self._clock.now(),
                    )
                )
        else:
            surplus = verdict.surplus
            self._log.error(
                "an engine's counters differ from the ledger",
                engine=url,
                prompt_tokens=surplus.prompt,
                generation_tokens=surplus.generation,
            )
            self._compared[url] = counters

    async def _read_prices(self) -> None:
        book = await self._database.look(price_book.current_book)
        if book is not None:
            self._sheet.book = book
            self._log.info("price list read", number=book.number)

    async def _leads(self, job: str) -> bool:
        return await self._database.apply(
            lambda unit: unit.locks.hold(f"billing: {job}", owner=self._owner, lease_s=_LEASE_S, at=self._clock.now()),
            durable=False,
        )

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            try:
                await job()
            except Exception:
                self._log.exception("a job of the biller failed; it is tried again")
            await asyncio.sleep(every_s)


def _storage_fact(fact: Fact) -> UsageFact:
    return UsageFact(
        source=fact.source,
        meter=Meter.STORAGE,
        quantity=fact.quantity,
        project_id=ProjectId(fact.project_id),
        key_id=KeyId(fact.key_id),
        session_id=None,
        version_id=None,
        base_model=fact.base_model,
        at=moment(fact.at),
    )
