"""The trainer's loop on a real store: sessions, submitted work, and trainers that can be lost."""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.core.bodies import Body
from gateway.core.catalog import BaseModel
from gateway.core.ids import KeyId, ProjectId, new_key_id, new_session_id
from gateway.core.operations import Operation
from gateway.core.payloads import Payload
from gateway.core.ports import Artifacts, Wakeups
from gateway.core.principals import ALL_SCOPES, Key
from gateway.core.scripted import read_fingerprint
from gateway.core.sessions import Activity, ComputeRules, LoraConfig, OrderRule, Session, SessionStatus
from gateway.core.submission import submit
from gateway.core.versions import Version, VersionFilter, VersionKind
from gateway.store import LocalArtifacts, SqlDatabase
from tests.trainer.builders import lora
from trainer.backend import TrainingBackend
from trainer.kernels import Kernels
from trainer.loop import Limits, Trainer
from trainer.operation_log import OperationLog

LEASE_S = 15.0
RULES = ComputeRules(threads=1, micro_batch_tokens=1)


class HandClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@dataclass(kw_only=True)
class World:
    """A project on a fresh database. Every method is one unit of work."""

    database: SqlDatabase
    artifacts: LocalArtifacts
    kernels: Kernels
    clock: HandClock
    base: BaseModel
    project_id: ProjectId
    key_id: KeyId
    trainers: int = field(default=0)

    async def open(self, config: LoraConfig | None = None, *, order: OrderRule = OrderRule.STRICT) -> Session:
        now = self.clock.now()
        session = Session(
            id=new_session_id(),
            project_id=self.project_id,
            key_id=self.key_id,
            name=None,
            base_model=self.base.name,
            lora=config or lora(),
            group="policy",
            order=order,
            status=SessionStatus.CREATING,
            activity=Activity.IDLE,
            created_at=now,
            last_used_at=now,
            ttl_s=None,
            expires_at=None,
            user_metadata={},
            applied_seq=0,
            optimizer_step=0,
            window_broken_by=None,
            snapshot=None,
            latest_version_id=None,
            failure=None,
        )
        async with self.database.write() as unit:
            await unit.sessions.add(session, idempotency_key=None, request_digest="d")
        return session

    async def submit(self, session: Session, *payloads: Payload) -> list[Operation]:
        operations: list[Operation] = []
        for payload in payloads:
            async with self.database.write() as unit:
                operations.append(
                    await submit(
                        unit,
                        project_id=self.project_id,
                        key_id=self.key_id,
                        session_id=session.id,
                        body=Body.of(payload),
                    )
                )
        return operations

    def trainer(
        self,
        backend: TrainingBackend,
        *,
        kernels: Kernels | None = None,
        wakeups: Wakeups | None = None,
        artifacts: Artifacts | None = None,
        **limits: Any,
    ) -> Trainer:
        """Return a new trainer with an identity of its own; losing it is dropping it."""
        self.trainers += 1
        stopping = asyncio.Event()
        log = OperationLog(
            self.database,
            self.clock,
            owner=f"trainer-{self.trainers}",
            base_model=self.base.name,
            lease_s=LEASE_S,
            stopping=stopping,
        )
        return Trainer(
            backend=backend,
            kernels=kernels or self.kernels,
            log=log,
            wakeups=wakeups or self.database.wakeups,
            artifacts=artifacts or self.artifacts,
            clock=self.clock,
            limits=Limits(**{"heartbeat_s": 1.0, "snapshot_after_s": 1e9, "max_resident": 8, **limits}),
            stopping=stopping,
        )

    async def read(self, operation: Operation) -> Operation:
        async with self.database.read() as unit:
            return await unit.operations.get(self.project_id, operation.id)

    async def session(self, session: Session) -> Session:
        async with self.database.read() as unit:
            return await unit.sessions.get(self.project_id, session.id)

    async def versions(self) -> list[Version]:
        """Oldest first."""
        async with self.database.read() as unit:
            return list(reversed(await unit.versions.page(self.project_id, VersionFilter(), limit=100, after=None)))

    async def trained_tokens(self) -> int:
        async with self.database.read() as unit:
            total = 0
            for session in await unit.sessions.page(self.project_id, limit=200, after=None):
                for operation in await unit.operations.page(self.project_id, session.id, limit=1000, after_seq=0):
                    total += sum(fact.quantity for fact in await unit.usage.of_source(operation.id))
            return total

    def committed_locations(self) -> list[str]:
        """Everything on disk under a final name, snapshots first."""
        return sorted(path.name for path in self.artifacts.path("x").parent.glob("[!.]*"))

    def fingerprint(self, version: Version) -> str:
        """Return what the scripted backend saved as ``version``."""
        return read_fingerprint(self.artifacts.path(version.location))

    async def last_fingerprint(self) -> str:
        """Return that of the newest adapter."""
        versions = [version for version in await self.versions() if version.kind is VersionKind.ADAPTER]
        return self.fingerprint(versions[-1])

    async def claim_and_vanish(self, *, begin: bool = True) -> None:
        """Be a trainer that is lost right after its claim, or after it began the operation."""
        self.trainers += 1
        async with self.database.write() as unit:
            work = await unit.work.claim(
                owner=f"lost-{self.trainers}", base_model=self.base.name, lease_s=LEASE_S, at=self.clock.now()
            )
            assert work is not None
            if begin:
                await unit.work.begin(work, rules=RULES, made_with={"backend": "scripted"}, note=None)
        self.clock.advance(LEASE_S + 1)

    async def rebuild_and_vanish(self) -> None:
        """Be a trainer that is lost while it rebuilds the session."""
        self.trainers += 1
        async with self.database.write() as unit:
            work = await unit.work.claim(
                owner=f"lost-{self.trainers}", base_model=self.base.name, lease_s=LEASE_S, at=self.clock.now()
            )
            assert work is not None
            losses = 0 if work.session.recovery is None else work.session.recovery.losses + 1
            await unit.work.recovering(work.lease, seq=0, losses=losses)
        self.clock.advance(LEASE_S + 1)


async def drain(trainer: Trainer) -> int:
    """Run everything that is ready; return how many operations that were."""
    done = 0
    while await trainer.step():
        done += 1
    return done


async def make_world(database: SqlDatabase, kernels: Kernels, clock: HandClock, base: BaseModel, root: Path) -> World:
    key_id = new_key_id()
    async with database.write() as unit:
        project_id = await unit.keys.ensure_project("tests")
        await unit.keys.add(
            Key(
                id=key_id,
                project_id=project_id,
                name="tests",
                scopes=ALL_SCOPES,
                created_at=clock.now(),
                expires_at=None,
                revoked_at=None,
            )
        )
    return World(
        database=database,
        artifacts=LocalArtifacts(root),
        kernels=kernels,
        clock=clock,
        base=base,
        project_id=project_id,
        key_id=key_id,
    )
