"""What the gate found, kept: beside the version for its owner, and as metrics for the operator."""

import structlog

from gateway.core.errors import Unavailable
from gateway.core.ports import Database
from gateway.core.versions import Check, Version
from gateway.metrics import Metrics


class Verdicts:
    """The engine pool's witness. A verdict that cannot be stored now is logged: it must not undo what was judged."""

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._log = structlog.stdlib.get_logger("gateway.verdicts")

    async def __call__(self, version: Version, check: Check) -> None:
        self._metrics.saw(version, check)
        if check.failure is not None:
            self._log.error("version_failed_gate", version=version.id, engine=check.engine, reason=check.failure)
        try:
            async with self._database.write() as unit:
                await unit.upkeep.record_check(check)
        except Unavailable as error:
            self._log.warning("verdict_not_stored", version=version.id, engine=check.engine, code=error.code)
