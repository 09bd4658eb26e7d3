"""Core values as this dialect's responses."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import assert_never

from gateway.core.costs import cost_nanos, quantities
from gateway.core.ledger import UsageLine
from gateway.core.operations import Operation, Status
from gateway.core.ports import Prices, UnitOfWork
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, Outcome, SaveResult
from gateway.core.sampling import Generation, Target, TokenCounts
from gateway.core.sessions import LoraConfig, Session
from gateway.core.tensors import TensorData
from gateway.core.usage import Meter, UsageFact
from gateway.wire.native.schemas.operations import (
    FailureRead,
    ForwardRead,
    LoadStateRead,
    OperationRead,
    OptimStepRead,
    ProgressRead,
    ResultRead,
    SaveRead,
    TensorRead,
)
from gateway.wire.native.schemas.sampling import SampleUsageRead, SequenceRead
from gateway.wire.native.schemas.sessions import LoraRead, SessionRead

_UNRUN: Mapping[Status, FailureRead] = {
    Status.SKIPPED: FailureRead(
        code="operation_skipped",
        kind="conflict",
        message="the session stopped or failed before this operation ran",
        field=None,
        details={},
    ),
    Status.CANCELLED: FailureRead(
        code="operation_cancelled", kind="conflict", message="this operation was cancelled", field=None, details={}
    ),
}


def lora_read(lora: LoraConfig) -> LoraRead:
    return LoraRead(**asdict(lora))


async def session_read(unit: UnitOfWork, session: Session) -> SessionRead:
    return (await sessions_read(unit, [session]))[0]


async def sessions_read(unit: UnitOfWork, sessions: Sequence[Session]) -> list[SessionRead]:
    """Return sessions with what each has consumed up to now."""
    usage = await unit.ledger.session_usage([session.id for session in sessions])
    return [await _session_read(unit, session, usage.get(session.id)) for session in sessions]


async def _session_read(unit: UnitOfWork, session: Session, usage: UsageLine | None) -> SessionRead:
    latest = None
    if session.latest_version_id is not None:
        latest = await unit.versions.get(session.project_id, session.latest_version_id)
    return SessionRead(
        id=session.id,
        name=session.name,
        base_model=session.base_model,
        lora=lora_read(session.lora),
        model_package_group=session.group,
        status=session.status,
        activity=session.activity,
        created_at=session.created_at,
        last_used_at=session.last_used_at,
        expires_at=session.expires_at,
        ttl_seconds=session.ttl_s,
        user_metadata=dict(session.user_metadata),
        applied_seq=session.applied_seq,
        optimizer_step=session.optimizer_step,
        latest_version=None if latest is None else latest.address,
        latest_version_id=session.latest_version_id,
        failure=session.failure,
        recovered_seq=None if session.recovery is None else session.recovery.seq,
        replay_note=session.replay_note,
        order=session.order,
        tokens=0 if usage is None else usage.quantity,
        cost_nanos=0 if usage is None else usage.nanos,
    )


def operation_read(operation: Operation, facts: Sequence[UsageFact], prices: Prices) -> OperationRead:
    result, error = _outcome_read(operation.outcome)
    return OperationRead(
        id=operation.id,
        session_id=operation.session_id,
        seq=operation.seq,
        kind=operation.kind,
        status=operation.status,
        created_at=operation.created_at,
        started_at=operation.started_at,
        finished_at=operation.finished_at,
        queue_position=operation.queue_position,
        waits_for_seq=operation.waits_for_seq,
        progress=None if operation.progress is None else ProgressRead(**asdict(operation.progress)),
        result=result,
        error=error or _UNRUN.get(operation.status),
        usage=dict(quantities(facts)),
        cost_nanos=cost_nanos(prices, facts),
    )


def _outcome_read(outcome: Outcome | None) -> tuple[ResultRead | None, FailureRead | None]:
    match outcome:
        case None:
            return None, None
        case ForwardResult():
            outputs = [{name: _tensor_read(tensor) for name, tensor in row.items()} for row in outcome.outputs]
            return ForwardRead(type="forward", loss_fn_outputs=outputs, metrics=dict(outcome.metrics)), None
        case OptimStepResult():
            return (
                OptimStepRead(type="optim_step", optimizer_step=outcome.optimizer_step, metrics=dict(outcome.metrics)),
                None,
            )
        case SaveResult():
            return (
                SaveRead(
                    type="save",
                    version=f"{outcome.group}@{outcome.number}",
                    version_id=outcome.version_id,
                    group=outcome.group,
                    number=outcome.number,
                    seq=outcome.seq,
                    optimizer_step=outcome.optimizer_step,
                ),
                None,
            )
        case LoadStateResult():
            return (
                LoadStateRead(
                    type="load_state",
                    version_id=outcome.version_id,
                    optimizer_step=outcome.optimizer_step,
                    discarded_gradient=outcome.discarded_gradient,
                ),
                None,
            )
        case Failure():
            return None, FailureRead(
                code=outcome.code,
                kind=outcome.kind,
                message=outcome.message,
                field=outcome.field,
                details=dict(outcome.details),
            )
        case _:
            assert_never(outcome)


def _tensor_read(tensor: TensorData) -> TensorRead:
    """Return the array as JSON numbers; they were checked when they were made, so they are not checked again."""
    return TensorRead.model_construct(dtype=tensor.dtype.value, shape=list(tensor.shape), data=tensor.values().tolist())


def sequences_read(generation: Generation) -> list[SequenceRead]:
    return [
        SequenceRead(
            tokens=list(sequence.tokens), logprobs=list(sequence.logprobs), stop_reason=sequence.stop_reason.value
        )
        for sequence in generation.sequences
    ]


def usage_read(counts: TokenCounts) -> SampleUsageRead:
    return SampleUsageRead(
        **{
            Meter.PREFILL.value: counts.prompt - counts.cached,
            Meter.CACHED_PREFILL.value: counts.cached,
            Meter.SAMPLE.value: counts.sampled,
        }
    )


def version_address(target: Target) -> str | None:
    return None if target.version is None else target.version.address


def version_id(target: Target) -> str | None:
    return None if target.version is None else target.version.id
