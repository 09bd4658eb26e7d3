"""Training sessions on the control plane: open, describe, list, stop and delete."""

from collections.abc import Mapping

from gateway.core.errors import Conflict, Invalid
from gateway.core.ids import SessionId
from gateway.core.ledger import UsageBy
from gateway.core.opening import drawn_seed, new_session
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import LoraConfig, OrderRule, Session, SessionStatus
from gateway.core.usage import Meter
from gateway.wire.idempotency import request_digest, reused
from gateway.wire.sagemaker.calls import PAGE, Call
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.names import (
    find_hub_content,
    find_training_session,
    group_arn,
    group_in,
    hub_arn,
    name_of,
    session_arn,
    status_of,
)
from gateway.wire.sagemaker.tags import metadata_of, tags_of
from gateway.wire.targets import SESSION_PREFIX

ROLE, PATH, EULA = "aws:role-arn", "aws:s3-path", "aws:accept-eula"  # no tag's key can begin with aws:
LOCAL_STORE = "s3://loopline-local-store"
_SCANNED = 1000  # sessions that one page looks at; a filter may leave few of them
_BILLED = {
    Meter.PREFILL: "PrefillTokenCount",
    Meter.CACHED_PREFILL: "PrefillTokenCount",
    Meter.SAMPLE: "SampleTokenCount",
    Meter.TRAIN: "TrainingTokenCount",
}
_ENDED = frozenset({SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.EXPIRED})


async def create(call: Call) -> Document:
    """Open a session. A request that is repeated by the client's own retries opens it once."""
    asked = call.asked
    name: str = asked["TrainingSessionName"]
    if name.startswith(SESSION_PREFIX) or name in call.catalog.models:
        raise Invalid(
            f"TrainingSessionName must not start with {SESSION_PREFIX!r} or be the name of a base model",
            field="TrainingSessionName",
        )
    _refuse_what_cannot_be_honoured(asked)
    base = asked["ModelConfig"]["BaseModelArn"].split("/")[3]
    model = find_hub_content(call.catalog, base, field="ModelConfig.BaseModelArn")
    digest = request_digest("sagemaker/CreateTrainingSession", await call.request.body())
    async with call.writing() as unit:
        known = await _opened_before(unit, call, digest)
        if known is not None:
            return {"TrainingSessionArn": session_arn(known)}
        session = new_session(
            project_id=call.project_id,
            key_id=call.principal.key_id,
            model=model,
            lora=LoraConfig(
                rank=asked["LoraConfig"]["Rank"],
                alpha=float(asked["LoraConfig"]["Alpha"]),
                train_attn=True,
                train_mlp=True,
                train_unembed=False,
                seed=drawn_seed(),
            ),
            order=OrderRule.ASCENDING,
            at=call.clock.now(),
            name=name,
            group=await _group(unit, call),
            ttl_s=call.request.state.sagemaker_idle_s,  # nothing tells that a client lives
            user_metadata=_metadata(asked),
            trains=False,
        )
        await unit.sessions.add(session, idempotency_key=_key(call), request_digest=digest)
    return {"TrainingSessionArn": session_arn(session)}


def _refuse_what_cannot_be_honoured(asked: Document) -> None:
    for given, field in (
        (asked.get("VpcConfig"), "VpcConfig"),
        (asked["OutputConfig"]["S3Location"].get("KmsKeyArn"), "OutputConfig.S3Location.KmsKeyArn"),
    ):
        if given is not None:
            raise Invalid(f"{field} is not offered here: leave it out", code="unsupported_field", field=field)


async def _opened_before(unit: UnitOfWork, call: Call, digest: str) -> Session | None:
    key = _key(call)
    if key is None:
        return None
    found = await unit.sessions.by_idempotency_key(call.project_id, key)
    if found is None:
        return None
    session, known = found
    if known != digest:
        raise reused()
    return session


def _key(call: Call) -> str | None:
    """The client sends one id with a call and with all its retries."""
    id = call.request.headers.get("amz-sdk-invocation-id")
    return f"sagemaker:{id}" if id is not None and len(id) <= 64 and id.isascii() and id.isprintable() else None


async def _group(unit: UnitOfWork, call: Call) -> str | None:
    arn = call.asked.get("ModelPackageGroupArn")
    if arn is None:
        return None
    group = group_in(arn, field="ModelPackageGroupArn")
    return (await unit.versions.group(call.project_id, group)).name


def _metadata(asked: Document) -> Mapping[str, str]:
    kept = {ROLE: asked["RoleArn"], PATH: asked["OutputConfig"]["S3Location"]["Path"]}
    if "AcceptEula" in asked["ModelConfig"]:
        kept[EULA] = str(asked["ModelConfig"]["AcceptEula"]).lower()
    return {**metadata_of(asked.get("Tags", ())), **kept}


async def describe(call: Call) -> Document:
    """Describe a session: what was asked of it, how far it is, and what it consumed."""
    async with call.database.read() as unit:
        session = await find_training_session(unit, call.project_id, call.asked["TrainingSessionName"])
        usage = await unit.ledger.usage(
            (UsageBy.METER,), project_id=call.project_id, sessions=[session.id], since=None, until=None
        )
        highest = await unit.operations.highest_seq(session.id)
    model = call.catalog.models.get(session.base_model)
    eula = session.user_metadata.get(EULA)
    tokens = dict.fromkeys(_BILLED.values(), 0)
    for line in usage:
        meter = Meter(str(line.group[UsageBy.METER]))
        if meter in _BILLED:
            tokens[_BILLED[meter]] += line.quantity
    return {
        "TrainingSessionDetail": {
            **_summary(session),
            "TrainingSessionName": name_of(session),
            "ModelPackageGroupArn": group_arn(session.group),
            "EndTime": session.last_used_at if session.status in _ENDED else None,
            "ErrorDetails": None if session.failure is None else session.failure[:1024],
            "LastReceivedSequenceNumber": highest,
            "BillableTokenUsage": tokens,
            "RoleArn": session.user_metadata.get(ROLE),
            "LoraConfig": {"Rank": session.lora.rank, "Alpha": round(session.lora.alpha)},
            "ModelConfig": None
            if model is None
            else {"BaseModelArn": hub_arn(model), "AcceptEula": None if eula is None else eula == "true"},
            "OutputConfig": {"S3Location": {"Path": call.artifacts.url or f"{LOCAL_STORE}/{session.group}"}},
            "Tags": tags_of(session.user_metadata),
        }
    }


def _summary(session: Session) -> Document:
    return {
        "TrainingSessionArn": session_arn(session),
        "TrainingSessionStatus": status_of(session),
        "CreationTime": session.created_at,
        "LastModifiedTime": session.last_used_at,
    }


async def list_page(call: Call) -> Document:
    """List the project's sessions, newest first, those of other dialects too."""
    found: list[Document] = []
    last, scanned = call.asked.get("NextToken"), 0
    async with call.database.read() as unit:
        while len(found) < call.page_size and scanned < _SCANNED:
            after = None if last is None else SessionId(last)
            page = await unit.sessions.page(call.project_id, limit=PAGE, after=after)
            scanned += len(page)
            for session in page:
                last = session.id
                if _wanted(session, call.asked):
                    found.append(_summary(session))
                if len(found) == call.page_size:
                    break
            else:
                if len(page) < PAGE:
                    last = None
                    break
    return {"TrainingSessionSummaries": found, "NextToken": last}


def _wanted(session: Session, asked: Document) -> bool:
    return (
        asked.get("NameContains", "") in name_of(session)
        and asked.get("StatusEquals", status_of(session)) == status_of(session)
        and asked.get("CreationTimeAfter", session.created_at) <= session.created_at
        and asked.get("CreationTimeBefore", session.created_at) >= session.created_at
    )


async def stop(call: Call) -> Document:
    """Stop a session: what is queued is skipped, what runs finishes.

    Raises:
        Conflict: it has been stopped before; clients know the refusal by its words, and take it for success.
    """
    async with call.writing() as unit:
        session = await find_training_session(unit, call.project_id, call.asked["TrainingSessionName"])
        if session.status in (SessionStatus.STOPPING, *_ENDED):
            raise _no_way(session, "Stopping")
        await unit.sessions.stop(call.project_id, session.id, call.clock.now())
    return {}


async def delete(call: Call) -> Document:
    """Take an ended session out of the lists; its model packages stay.

    Raises:
        Conflict: it has not ended.
    """
    async with call.writing() as unit:
        session = await find_training_session(unit, call.project_id, call.asked["TrainingSessionName"])
        if session.status not in _ENDED:
            raise _no_way(session, "Deleting")
        await unit.sessions.remove(call.project_id, session.id, call.clock.now())
    return {}


def _no_way(session: Session, to: str) -> Conflict:
    return Conflict(
        f"invalid session state transition from {status_of(session)} to {to}",
        code="session_transition",
        field="TrainingSessionName",
    )
