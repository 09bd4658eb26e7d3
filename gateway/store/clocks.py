"""One time for all processes of a machine, whatever is done to its clock between their starts.

A process leaves beside the data what its clock shows at which uptime. One that starts within ``KEPT_S`` of that goes on
from there: the two would else differ by as much as the machine's (or the database's) clock was set meanwhile, and take
each other's leases for over.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from sqlalchemy import BigInteger, Column, Connection, Table, Text, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from gateway.core.clock import SystemClock
from gateway.core.errors import GatewayError
from gateway.store.columns import UtcMicros
from gateway.store.tables import metadata

T = TypeVar("T")
INTERVAL_S = 60.0  # in which two clocks can drift apart by 2 * 0.3 s: see SystemClock.MAX_SLEW
KEPT_S = 600.0  # nobody has left anything for so long: nobody is there
WRITE_S = 3.0  # nobody waits longer for somebody who holds the database
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"

clocks = Table(
    "clocks",
    metadata,
    Column("machine", Text, primary_key=True, comment="Which, since which boot"),
    Column("uptime", BigInteger, nullable=False, comment="Microseconds since that boot"),
    Column("shown", UtcMicros, nullable=False, comment="What its processes' clocks showed then"),
)


class Tables(Protocol):
    def look(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...

    def change(self, work: Callable[[Connection], T], *, durable: bool = True) -> Awaitable[T]: ...


@asynccontextmanager
async def shared(database: Tables, clock: SystemClock) -> AsyncGenerator[None]:
    """Set ``clock`` to what the others of this machine show, and let those who come later find it."""
    machine = this_machine()
    if machine is None:
        yield
        return
    if not await join(database, clock, machine):
        await leave(database, clock, machine)
    leaving = asyncio.create_task(_keep(database, clock, machine), name="shared-clock")
    try:
        yield
    finally:
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving


def this_machine() -> str | None:
    """Return what those have in common whose uptimes can be compared; None: it cannot be told."""
    try:
        return f"{_BOOT.read_text().strip()} {os.stat(_NAMESPACE).st_ino}"
    except OSError:
        return None


async def join(database: Tables, clock: SystemClock, machine: str) -> bool:
    """Go on from what another process left lately; False: there is nothing."""
    left = await database.look(lambda connection: _left(connection, machine))
    if left is None:
        return False
    shown, uptime = left
    if not 0 <= clock.uptime - uptime <= KEPT_S:
        return False
    clock.go_on(shown, uptime)
    return True


async def leave(database: Tables, clock: SystemClock, machine: str) -> None:
    """Leave what ``clock`` shows for those who come later, if the database can keep it now."""
    shown, uptime = clock.now(), round(clock.uptime * 1e6)

    def write(connection: Connection) -> None:
        insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(clocks)
        values = {"uptime": uptime, "shown": shown}
        connection.execute(
            insert.values(machine=machine, **values).on_conflict_do_update(
                index_elements=[clocks.c.machine], set_=values
            )
        )

    try:
        async with asyncio.timeout(WRITE_S):
            await database.change(write, durable=False)
    except (GatewayError, SQLAlchemyError, TimeoutError) as error:  # no reason to do without the rest of the process
        structlog.stdlib.get_logger("gateway.store").warning("clock_not_shared", reason=repr(error))


async def _keep(database: Tables, clock: SystemClock, machine: str) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        await leave(database, clock, machine)


def _left(connection: Connection, machine: str) -> tuple[datetime, float] | None:
    row = connection.execute(select(clocks.c.shown, clocks.c.uptime).where(clocks.c.machine == machine)).one_or_none()
    return None if row is None else (row.shown, row.uptime / 1e6)
