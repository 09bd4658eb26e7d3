"""Submitting work: the checks that come before an operation exists, and the retry rules.

Everything refused here is refused before anything is recorded.
"""

from dataclasses import asdict, replace
from typing import assert_never

from gateway.core.addresses import check_name
from gateway.core.bodies import Body
from gateway.core.catalog import BaseModel
from gateway.core.errors import Conflict, Invalid, SequenceReused
from gateway.core.ids import KeyId, ProjectId, SessionId
from gateway.core.ledger import WorstCase
from gateway.core.limits import Limit
from gateway.core.operations import MAX_SEQ, Operation
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Payload,
    SaveState,
    SaveWeights,
    billed_tokens,
)
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session
from gateway.core.validation import check_forward, check_optim_step
from gateway.core.versions import Labels, VersionKind, VersionState, check_group_name, name_taken

MAX_DESCRIPTION = 1024


def check_payload(payload: Payload, model: BaseModel) -> None:
    """Check everything that can be known of ``payload`` without the database.

    Raises:
        Invalid: names field, index and limit.
    """
    match payload:
        case Forward() | ForwardBackward():
            check_forward(payload, model)
        case OptimStep():
            check_optim_step(payload)
        case SaveWeights() | SaveState():
            check_group_name(payload.group)
            check_labels(payload.labels)
        case LoadState():
            pass
        case _:
            assert_never(payload)


def check_labels(labels: Labels) -> None:
    """Check what ``Labels`` leaves open.

    Raises:
        Invalid: a name that is none, a description that is too long.
    """
    if labels.name is not None:
        check_name(labels.name)
    if len(labels.description) > MAX_DESCRIPTION:
        raise Invalid(f"description is longer than {MAX_DESCRIPTION} characters", field="description")


async def submit(
    unit: UnitOfWork,
    *,
    project_id: ProjectId,
    key_id: KeyId,
    session_id: SessionId,
    body: Body,
    seq: int | None = None,
    idempotency_key: str | None = None,
    adopting: bool = False,
) -> Operation:
    """Queue a checked payload as the session's ``seq``-th operation; without a seq, as its next one.

    Submitting the same ``(session, seq, payload)`` again, or the same idempotency key with the same payload,
    returns the operation already there, so a client may retry after a lost response, also after a stop. With
    ``adopting`` a session whose first operation is a load_state takes the LoRA configuration of what it loads.

    Raises:
        NotFound: no such session in the project, or (load_state) no such state.
        SequenceReused: ``seq`` is taken by other content.
        QuotaFull: the project or the key has as many operations queued, or versions or bytes stored, as it may.
        OutOfBudget: what the operation costs does not fit into a budget; nothing was queued.
        Conflict: the session no longer accepts work; the seq has been passed; the key was used for other content; a
            save's name is taken.
        Invalid: seq out of range; load_state of a version that does not fit the session.
    """
    if seq is not None and not 1 <= seq <= MAX_SEQ:
        raise Invalid(f"seq must be 1 to {MAX_SEQ}, got {seq}", field="seq")
    payload, digest = body.payload, body.digest
    session = await unit.sessions.get(project_id, session_id)
    await unit.blobs.add(project_id, body)
    if idempotency_key is not None:
        known = await unit.operations.by_idempotency_key(project_id, idempotency_key)
        if known is not None:
            if known.session_id != session_id or known.payload_digest != digest or seq not in (None, known.seq):
                raise Conflict(
                    "this Idempotency-Key was already used for other content",
                    code="idempotency_key_reused",
                    field="Idempotency-Key",
                )
            return known
    if seq is not None:
        known = await unit.operations.by_seq(session_id, seq)
        if known is not None:
            if known.payload_digest != digest:
                raise SequenceReused(session_id, seq)
            return known
    session.require_running()
    if seq is not None and seq <= session.applied_seq:
        raise Conflict(
            f"seq {seq} was given up: the session already applied {session.applied_seq}",
            code="sequence_passed",
            field="seq",
        )
    if isinstance(payload, LoadState):
        if adopting and await unit.operations.highest_seq(session_id) == 0:
            version = await unit.versions.get(project_id, payload.version_id)
            session = await unit.sessions.adopt(session_id, replace(version.lora, seed=session.lora.seed))
        await _check_load(unit, session, payload)
    if isinstance(payload, SaveWeights | SaveState) and payload.labels.name is not None:
        await _check_free(unit, session, payload)
    await unit.limits.require_room(project_id, key_id, Limit.QUEUE)
    if isinstance(payload, SaveWeights | SaveState):
        await unit.limits.require_room(project_id, key_id, Limit.VERSIONS)
        await unit.limits.require_room(project_id, key_id, Limit.STORED)
    operation = await unit.operations.add(
        session=session, key_id=key_id, seq=seq, payload=payload, digest=digest, idempotency_key=idempotency_key
    )
    tokens = billed_tokens(payload)
    if tokens:
        await unit.limits.reserve(project_id, key_id, tokens)
        await unit.ledger.hold(
            WorstCase(
                source=operation.id,
                project_id=project_id,
                key_id=key_id,
                session_id=session_id,
                base_model=session.base_model,
                trained=tokens,
                ours=False,
            )
        )
    return operation


async def _check_free(unit: UnitOfWork, session: Session, payload: SaveWeights | SaveState) -> None:
    kind = VersionKind.STATE if isinstance(payload, SaveState) else VersionKind.ADAPTER
    if isinstance(payload, SaveWeights) and payload.merge:
        kind = VersionKind.MERGED
    name = payload.labels.name or ""
    if await unit.versions.by_name(session.id, kind, name) is not None:
        raise name_taken(name, kind)


async def _check_load(unit: UnitOfWork, session: Session, payload: LoadState) -> None:
    version = await unit.versions.get(session.project_id, payload.version_id)
    version.require_present()
    if version.kind is VersionKind.MERGED or (version.kind is VersionKind.ADAPTER and payload.optimizer):
        lacks = "a state or an adapter can be loaded" if version.kind is VersionKind.MERGED else "it has no optimizer"
        raise Invalid(
            f"{version.address} is of kind {version.kind}; {lacks}",
            code="wrong_version_kind",
            field="version",
        )
    if version.state is VersionState.REJECTED:
        raise Conflict(f"{version.address} was rejected", code="version_rejected", field="version")
    if version.base_model != session.base_model:
        raise Invalid(
            f"{version.address} was trained on {version.base_model}, the session runs {session.base_model}",
            code="base_model_mismatch",
            field="version",
        )
    theirs, ours = asdict(version.lora), asdict(session.lora)
    for name in sorted(theirs.keys() - {"seed"}):
        if theirs[name] != ours[name]:
            raise Invalid(
                f"{version.address} has {name} {theirs[name]}, the session {ours[name]}",
                code="lora_mismatch",
                field="version",
            )
