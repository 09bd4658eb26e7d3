"""The trainer's view of the log: what to run or score, what came of it. The database may be away for a while.

Every call waits for the database to come back, as long as the process is wanted. A report may therefore be sent twice,
when the first one's answer was lost; the store takes it once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import structlog

from gateway.core.clock import Clock
from gateway.core.ids import SessionId, VersionId
from gateway.core.operations import Operation, Progress, Status
from gateway.core.payloads import OperationKind, Payload
from gateway.core.ports import Database, Lease, ScoreWork, UnitOfWork, Work
from gateway.core.results import Outcome, SaveResult
from gateway.core.scores import ScoreOutcome
from gateway.core.sessions import ComputeRules, Session, Snapshot
from gateway.core.usage import UsageFact
from gateway.core.versions import NewVersion, Version, VersionFilter, VersionKind
from gateway.processes import is_gone
from trainer.patience import Patience

T = TypeVar("T")
_PAGE, _NEWEST = 500, 50
_WINDOW_ENDING = frozenset({OperationKind.OPTIM_STEP, OperationKind.LOAD_STATE})
_REPLAYED = _WINDOW_ENDING | {OperationKind.FORWARD_BACKWARD}


class OperationLog:
    """Reads and fenced writes of one trainer process. ``stopping`` ends the patience with an absent database."""

    def __init__(
        self, database: Database, clock: Clock, *, owner: str, base_model: str, lease_s: float, stopping: asyncio.Event
    ) -> None:
        self._database = database
        self._clock = clock
        self._owner = owner
        self._base_model = base_model
        self._lease_s = lease_s
        self._patience = Patience(stopping)
        self._log = structlog.stdlib.get_logger("trainer")

    async def claim(self, resident: Collection[SessionId]) -> Work | None:
        """Return the next operation. One of a ``resident`` session begins at once, others with ``begin``."""
        return await self._write(
            lambda unit: unit.work.claim(
                owner=self._owner,
                base_model=self._base_model,
                lease_s=self._lease_s,
                at=self._clock.now(),
                resident=resident,
            )
        )

    async def renew(self) -> Mapping[SessionId, int]:
        """Extend this trainer's leases and its sign of life; return the epoch of every session still held."""

        async def extend(unit: UnitOfWork) -> Mapping[SessionId, int]:
            now = self._clock.now()
            await unit.locks.hold(f"trainer-{self._base_model}", owner=self._owner, lease_s=self._lease_s, at=now)
            for owner in await unit.work.owners(self._base_model):
                if owner != self._owner and is_gone(owner):  # its sessions need not wait for its leases to run out
                    released = await unit.work.release_all(owner)
                    self._log.info("leases_of_dead_trainer_released", owner=owner, sessions=released)
            await unit.score_work.renew(owner=self._owner, lease_s=self._lease_s, at=now)
            return await unit.work.renew(owner=self._owner, lease_s=self._lease_s, at=now)

        return await self._write(extend)

    async def claim_score(self) -> ScoreWork | None:
        """Take a waiting score. Where none waits, that costs a read and no write."""
        base_model = self._base_model
        if not await self._read(lambda unit: unit.score_work.waiting(base_model=base_model, at=self._clock.now())):
            return None
        return await self._write(
            lambda unit: unit.score_work.claim(
                owner=self._owner, base_model=base_model, lease_s=self._lease_s, at=self._clock.now()
            )
        )

    async def finish_score(self, work: ScoreWork, outcome: ScoreOutcome, facts: Sequence[UsageFact]) -> None:
        """Record a score with its usage. Raises StaleLease."""
        await self._write(lambda unit: unit.score_work.finish(work, outcome, facts=facts, at=self._clock.now()))

    async def finish(self, work: Work, outcome: Outcome, facts: Sequence[UsageFact]) -> None:
        """Record an outcome with its usage. Raises StaleLease."""
        await self._write(
            lambda unit: unit.work.finish(work.lease, work.operation, outcome, facts=facts, at=self._clock.now())
        )

    async def set_progress(self, work: Work, progress: Progress) -> None:
        """Show how far the running operation has come."""
        await self._write(lambda unit: unit.work.set_progress(work.lease, work.operation.id, progress))

    async def stage(self, work: Work, version: NewVersion, *, complete: bool) -> SaveResult:
        """Register a staged version. Raises StaleLease."""
        return await self._write(
            lambda unit: unit.work.stage(work.lease, work.operation, version, complete=complete, at=self._clock.now())
        )

    async def fail_session(self, lease: Lease, reason: str) -> None:
        """End the session: the running operation fails, queued ones are skipped. Raises StaleLease."""
        await self._write(lambda unit: unit.work.fail_session(lease, reason, at=self._clock.now()))

    async def snapshot_taken(self, lease: Lease, snapshot: Snapshot, made_with: Mapping[str, str]) -> None:
        """Raises StaleLease."""
        await self._write(lambda unit: unit.work.snapshot_taken(lease, snapshot, made_with=made_with))

    async def recovering(self, lease: Lease, *, seq: int, losses: int) -> None:
        """Show how far the session's rebuild has come. Raises StaleLease."""
        await self._write(lambda unit: unit.work.recovering(lease, seq=seq, losses=losses))

    async def begin(self, work: Work, *, rules: ComputeRules, made_with: Mapping[str, str], note: str | None) -> None:
        """The session is in memory and the operation starts now. Raises StaleLease."""
        await self._write(lambda unit: unit.work.begin(work, rules=rules, made_with=made_with, note=note))

    async def give_back(self, work: Work) -> None:
        """Release the session; what ``work`` would run stays to be run. Raises StaleLease."""
        await self._write(lambda unit: unit.work.give_back(work))

    async def release(self, lease: Lease) -> None:
        await self._write(lambda unit: unit.work.release(lease))

    async def payload(self, session: Session, operation: Operation) -> Payload:
        return await self._read(lambda unit: unit.blobs.get_payload(session.project_id, operation.payload_digest))

    async def version(self, session: Session, version_id: VersionId) -> Version:
        """Raises NotFound."""
        return await self._read(lambda unit: unit.versions.get(session.project_id, version_id))

    async def adapters_between(self, session: Session, number: int, seq: int) -> Sequence[int]:
        """Return the ascending numbers above ``number`` of the session's adapters in its group saved before ``seq``."""

        async def collect(unit: UnitOfWork) -> Sequence[int]:
            found: list[int] = []
            after: VersionId | None = None
            wanted = VersionFilter(group=session.group, deleted=True)
            while page := await unit.versions.page(session.project_id, wanted, limit=_NEWEST, after=after):
                found += [
                    version.number
                    for version in page
                    if version.session_id == session.id
                    and version.kind is VersionKind.ADAPTER
                    and number < version.number
                    and version.seq < seq
                ]
                if page[-1].number <= number:
                    break
                after = page[-1].id
            return sorted(found)

        return await self._read(collect)

    async def to_replay(self, session: Session, after: int) -> Sequence[Operation]:
        """Return, in order, what happened to a session after seq ``after`` that its state depends on.

        These are the completed forward_backward, optim_step and load_state operations, and the failed ones of the
        last two: they ended a window.
        """

        async def collect(unit: UnitOfWork) -> Sequence[Operation]:
            found = list(await unit.work.completed_after(session.id, after))
            at = after
            while page := await unit.operations.page(session.project_id, session.id, limit=_PAGE, after_seq=at):
                found.extend(o for o in page if o.status is Status.FAILED and o.kind in _WINDOW_ENDING)
                at = page[-1].seq
            return sorted(
                (o for o in found if o.seq <= session.applied_seq and o.kind in _REPLAYED), key=lambda o: o.seq
            )

        return await self._read(collect)

    async def _read(self, action: Callable[[UnitOfWork], Awaitable[T]]) -> T:
        async def attempt() -> T:
            async with self._database.read() as unit:
                return await action(unit)

        return await self._patience.wait_for("database", attempt)

    async def _write(self, action: Callable[[UnitOfWork], Awaitable[T]]) -> T:
        async def attempt() -> T:
            async with self._database.write() as unit:
                return await action(unit)

        return await self._patience.wait_for("database", attempt)
