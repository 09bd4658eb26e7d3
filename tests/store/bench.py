"""Short ways to what the store tests do: one project, sessions, operations, a trainer."""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gateway.core.catalog import BaseModel
from gateway.core.ids import (
    KeyId,
    OperationId,
    ProjectId,
    SampleId,
    SessionId,
    new_key_id,
    new_sample_id,
    new_session_id,
    new_version_id,
)
from gateway.core.operations import Operation
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep, Payload, SaveWeights
from gateway.core.ports import Work
from gateway.core.principals import ALL_SCOPES, Principal
from gateway.core.results import ForwardResult, OptimStepResult, Outcome, SaveResult
from gateway.core.sampling import Target
from gateway.core.sessions import Activity, ComputeRules, LoraConfig, OrderRule, Session, SessionStatus
from gateway.core.submission import submit
from gateway.core.tensors import Datum, TensorData
from gateway.core.usage import Meter, UsageFact
from gateway.core.versions import CanaryReport, Labels, NewVersion, VersionKind
from gateway.store import SqlDatabase
from gateway.wire.metering import Call

BASE = "tiny"
LEASE_S = 10.0
RULES = ComputeRules(threads=2, micro_batch_tokens=2048)
MODEL = BaseModel(
    name=BASE,
    path=Path("/models/tiny"),
    dtype="float32",
    vocab_size=512,
    context_length=128,
    max_lora_rank=32,
    max_loras=4,
    engines=(),
)
LORA = LoraConfig(rank=8, alpha=16.0, train_attn=True, train_mlp=True, train_unembed=False, seed=7)
REPORT = CanaryReport(
    mean_difference=1e-6,
    max_difference=1e-5,
    tolerance=1e-3,
    mean_tolerance=2e-4,
    control_mean_difference=0.0,
    base_mean_difference=0.5,
    effect_ratio=1.0,
    inconclusive=False,
    engine="http://127.0.0.1:8101",
    seconds=0.25,
)


class HandClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def advance(self, seconds: float) -> datetime:
        self.time += timedelta(seconds=seconds)
        return self.time


def forward_backward(tokens: int = 4, first: int = 1) -> ForwardBackward:
    """One datum of ``tokens`` tokens; another ``first`` is another payload."""
    ids = [(first + place) % MODEL.vocab_size for place in range(tokens)]
    datum = Datum(
        model_input=TensorData.ints(ids),
        loss_fn_inputs={
            "target_tokens": TensorData.ints(ids),
            "weights": TensorData.floats([1.0] * tokens),
        },
    )
    return ForwardBackward(data=(datum,), loss_fn=LossFn.CROSS_ENTROPY, loss_fn_config={})


def forward_result(loss: float = 1.5) -> ForwardResult:
    return ForwardResult(outputs=({"logprobs": TensorData.floats([-1.0, -2.5])},), metrics={"loss:sum": loss})


def new_session(project_id: ProjectId, key_id: KeyId, at: datetime, **changes: object) -> Session:
    fields: dict[str, object] = {
        "id": new_session_id(),
        "project_id": project_id,
        "key_id": key_id,
        "name": None,
        "base_model": BASE,
        "lora": LORA,
        "group": "policy",
        "order": OrderRule.STRICT,
        "status": SessionStatus.CREATING,
        "activity": Activity.IDLE,
        "created_at": at,
        "last_used_at": at,
        "ttl_s": None,
        "expires_at": None,
        "user_metadata": {},
        "applied_seq": 0,
        "optimizer_step": 0,
        "window_broken_by": None,
        "snapshot": None,
        "latest_version_id": None,
        "failure": None,
    }
    return Session(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def new_version(
    seq: int, *, group: str = "policy", kind: VersionKind = VersionKind.ADAPTER, labels: Labels | None = None
) -> NewVersion:
    id = new_version_id()
    return NewVersion(
        id=id,
        kind=kind,
        group=group,
        base_model=BASE,
        lora=LORA,
        seq=seq,
        optimizer_step=3,
        location=f"{id}-e1",
        manifest_sha256=hashlib.sha256(id.encode()).hexdigest(),
        size_bytes=1234,
        labels=labels or Labels(),
        base_sha256="b" * 64,
        code_version="0",
    )


@dataclass(kw_only=True)
class Bench:
    """Each method is one unit of work."""

    database: SqlDatabase
    clock: HandClock
    project_id: ProjectId
    key_id: KeyId
    sessions: list[SessionId] = field(default_factory=list)

    def call(self, *, prompt: int, sampled: int, sample_id: SampleId | None = None) -> Call:
        """Return a call of the base model that can consume so much at most."""
        return Call(
            sample_id=sample_id or new_sample_id(),
            principal=Principal(project_id=self.project_id, key_id=self.key_id, scopes=ALL_SCOPES),
            session=None,
            target=Target(base=MODEL, version=None),
            tag=None,
            prompt=prompt,
            sampled=sampled,
            engine_prompt=prompt,
            engine_sampled=sampled,
        )

    async def open(self, **changes: object) -> Session:
        session = new_session(self.project_id, self.key_id, self.clock.now(), **changes)
        async with self.database.write() as unit:
            await unit.sessions.add(session, idempotency_key=None, request_digest="d")
        return session

    async def submit(
        self,
        session: Session,
        payload: Payload | None = None,
        *,
        seq: int | None = None,
        idempotency_key: str | None = None,
    ) -> Operation:
        body = await self.database.prepare(session.project_id, payload or OptimStep())
        return await self.database.apply(
            lambda unit: submit(
                unit,
                project_id=session.project_id,
                key_id=session.key_id,
                session_id=session.id,
                body=body,
                seq=seq,
                idempotency_key=idempotency_key,
            )
        )

    async def claim(self, owner: str = "trainer-a", *, base_model: str = BASE) -> Work | None:
        async with self.database.write() as unit:
            return await unit.work.claim(owner=owner, base_model=base_model, lease_s=LEASE_S, at=self.clock.now())

    async def claimed(self, owner: str = "trainer-a") -> Work:
        work = await self.claim(owner)
        assert work is not None
        return work

    async def begin(self, work: Work) -> None:
        async with self.database.write() as unit:
            await unit.work.begin(work, rules=RULES, made_with={"torch": "1"}, note=None)

    async def finish(self, work: Work, outcome: Outcome | None = None, *facts: UsageFact) -> None:
        outcome = outcome or OptimStepResult(optimizer_step=work.session.optimizer_step + 1, metrics={})
        async with self.database.write() as unit:
            await unit.work.finish(work.lease, work.operation, outcome, facts=facts, at=self.clock.now())

    async def run_one(self, owner: str = "trainer-a", outcome: Outcome | None = None) -> Operation:
        """Claim and finish one operation."""
        work = await self.claimed(owner)
        await self.finish(work, outcome)
        return await self.operation(work.operation.id)

    async def stage(self, work: Work, *, complete: bool = False, version: NewVersion | None = None) -> SaveResult:
        async with self.database.write() as unit:
            return await unit.work.stage(
                work.lease,
                work.operation,
                version or new_version(work.operation.seq),
                complete=complete,
                at=self.clock.now(),
            )

    async def save(self, session: Session, *, complete: bool = False, group: str = "policy") -> SaveResult:
        """Submit, claim and stage one save_weights."""
        await self.submit(session, SaveWeights(group=group))
        work = await self.claimed()
        return await self.stage(work, complete=complete, version=new_version(work.operation.seq, group=group))

    async def session(self, session: Session) -> Session:
        async with self.database.read() as unit:
            return await unit.sessions.get(session.project_id, session.id)

    async def operation(self, id: OperationId) -> Operation:
        async with self.database.read() as unit:
            return await unit.operations.get(self.project_id, id)

    def fact(self, source: str, quantity: int = 5, meter: Meter = Meter.TRAIN) -> UsageFact:
        return UsageFact(
            source=source,
            meter=meter,
            quantity=quantity,
            project_id=self.project_id,
            key_id=self.key_id,
            session_id=None,
            version_id=None,
            base_model=BASE,
            at=self.clock.now(),
        )


async def open_bench(database: SqlDatabase, clock: HandClock, project: str = "main") -> Bench:
    async with database.write() as unit:
        project_id = await unit.keys.ensure_project(project)
    return Bench(database=database, clock=clock, project_id=project_id, key_id=new_key_id())
