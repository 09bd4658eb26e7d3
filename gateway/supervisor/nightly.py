"""Every night the books are proved (``python -m billing.reconcile``); a difference is said aloud and kept in a log."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

HOUR_UTC = 3


def seconds_until(now: datetime, hour: int = HOUR_UTC) -> float:
    """Return the time to the next full hour ``hour`` (UTC)."""
    today = now.astimezone(UTC).replace(hour=hour, minute=0, second=0, microsecond=0)
    return ((today if today > now else today + timedelta(days=1)) - now).total_seconds()


async def reconcile_nightly(database_url: str, engines: Sequence[str], log: Path, alert: Callable[[str], None]) -> None:
    """Reconcile every night until cancelled; ``alert`` hears of differences."""
    while True:
        await asyncio.sleep(seconds_until(datetime.now(UTC)))
        if await reconcile_once(database_url, engines, log) != 0:
            alert(f"The ledger does not reconcile: see {log}")


async def reconcile_once(database_url: str, engines: Sequence[str], log: Path) -> int:
    """Reconcile, append what was found to ``log``, and return the exit status: 0 when nothing differs."""
    arguments = [part for url in engines for part in ("--engine", url)]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "billing.reconcile", *arguments),
        env={**os.environ, "LOOPLINE_DATABASE_URL": database_url},  # not an argument: it may hold a password
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await child.communicate()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    with log.open("ab") as file:
        file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} exit status {child.returncode}\n".encode() + output)
    return child.returncode or 0
