"""Samplers, and drawing from them. A sample is taken at once, computed in the background, and fetched as a future."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from gateway.core.clients import Sampler, Seat, parse_sampler_address
from gateway.core.errors import Invalid, NotFound
from gateway.core.futures import MAX_WAIT_S
from gateway.core.ids import ProjectId, SampleId
from gateway.core.ports import Database, UnitOfWork
from gateway.core.sampling import Target
from gateway.core.sessions import Session
from gateway.core.versions import Version
from gateway.wire.answering import call_of
from gateway.wire.deps import (
    AllowanceDep,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    EnginesDep,
    InferenceCaller,
    Reading,
    SamplingJobsDep,
    ScoreFuturesDep,
    Writing,
)
from gateway.wire.idempotency import request_digest
from gateway.wire.limits import check_sizes
from gateway.wire.metering import held
from gateway.wire.sampling_jobs import Answered
from gateway.wire.scoring import Scorer
from gateway.wire.targets import headers_of, sampler_target
from gateway.wire.tinker.answers import answer
from gateway.wire.tinker.checkpoints import find_checkpoint, path_of
from gateway.wire.tinker.protobuf import encode_sample
from gateway.wire.tinker.questions import question_of
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.sampling_schemas import (
    CreateSamplerAsked,
    JoinSamplerAsked,
    JoinSamplerTold,
    SampleAsked,
    SamplerRead,
    SamplerTold,
)
from gateway.wire.tinker.schemas import SampleFuture
from gateway.wire.tinker.translate import find_base_model, find_client
from gateway.wire.tokenizers import tokenizer_of

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_sampling_session")
async def create_sampler(
    body: CreateSamplerAsked, principal: InferenceCaller, catalog: CatalogDep, clock: ClockDep, unit: Writing
) -> SamplerTold:
    """Make a handle on a checkpoint, or on a base model. The same number of the same program names the same handle."""
    client = await find_client(unit, principal.project_id, body.session_id)
    client.require_running()
    version: Version | None = None
    if body.model_path is not None:
        version = await find_checkpoint(unit, principal.project_id, body.model_path, at=clock.now(), sampling=True)
    elif body.base_model is None:
        raise Invalid("give model_path or base_model", field="model_path")
    base = find_base_model(catalog, version.base_model if version is not None else body.base_model or "")
    if version is not None and body.base_model is not None and find_base_model(catalog, body.base_model) != base:
        raise Invalid(
            f"the checkpoint was trained on {base.name}, not on the base_model given",
            code="base_model_mismatch",
            field="base_model",
        )
    seat = Seat(client_id=client.id, number=body.sampling_session_seq_id)
    sampler = await unit.clients.add_sampler(
        Sampler(
            seat=seat,
            project_id=principal.project_id,
            base_model=base.name,
            version_id=None if version is None else version.id,
            operation_id=None,
            session_id=None,
            copies=0,
            created_at=clock.now(),
        )
    )
    if (sampler.base_model, sampler.version_id) != (base.name, None if version is None else version.id):
        raise Invalid(f"{seat.sampler_address} was opened by another request", code="sequence_reused")
    return SamplerTold(sampling_session_id=seat.sampler_address)


@router.post("/join_sampling_session")
async def join_sampler(body: JoinSamplerAsked, principal: InferenceCaller, unit: Writing) -> JoinSamplerTold:
    """Give one more process that uses a handle a number of its own."""
    sampler = await _sampler(unit, principal.project_id, body.sampling_session_id)
    return JoinSamplerTold(client_counter=await unit.clients.join_sampler(principal.project_id, sampler.seat))


@router.get("/samplers/{sampler_id}")
async def read_sampler(
    sampler_id: str, request: Request, principal: InferenceCaller, catalog: CatalogDep, unit: Reading
) -> SamplerRead:
    """Say what a handle stands for."""
    sampler = await _sampler(unit, principal.project_id, sampler_id)
    path = None
    if sampler.version_id is not None:
        path = await path_of(unit, await unit.versions.get(principal.project_id, sampler.version_id))
    base = tokenizer_of(catalog.get(sampler.base_model), request)
    return SamplerRead(sampler_id=sampler.seat.sampler_address, base_model=base, model_path=path)


async def _sampler(unit: UnitOfWork, project_id: ProjectId, sampling_session_id: str) -> Sampler:
    seat = parse_sampler_address(sampling_session_id)
    if seat is None:
        raise NotFound("no such sampling session", code="sampler_not_found", field="sampling_session_id")
    return await unit.clients.sampler(project_id, seat)


async def _asked_sampler(body: SampleAsked, principal: InferenceCaller, database: DatabaseDep) -> Sampler:
    if body.sampling_session_id is None or body.seq_id is None or body.base_model or body.model_path:
        raise Invalid("give sampling_session_id and seq_id, and neither base_model nor model_path")
    async with database.read() as unit:
        return await _sampler(unit, principal.project_id, body.sampling_session_id)


@router.post("/asample")
async def asample(
    body: SampleAsked,
    sampler: Annotated[Sampler, Depends(_asked_sampler)],
    principal: InferenceCaller,
    catalog: CatalogDep,
    database: DatabaseDep,
    engines: EnginesDep,
    clock: ClockDep,
    jobs: SamplingJobsDep,
    scores: ScoreFuturesDep,
    allowance: AllowanceDep,
) -> SampleFuture:
    """Take a sample into work. The same ``seq_id`` of the same handle names the same sample."""
    question = question_of(body, catalog.get(sampler.base_model))
    check_sizes(allowance, question.request, samples="num_samples")

    async def work(sample_id: SampleId) -> Answered:
        target = await sampler_target(database, engines, catalog, clock, sampler)
        scorer = Scorer(
            database=database, futures=scores, clock=clock, principal=principal, idempotency_key=None, wait_s=MAX_WAIT_S
        )
        call = call_of(sample_id, principal, await _session_of(database, target), target, question.request)
        async with held(database, call, clock):
            generation, targets = await answer(engines, scorer, target, question, sample_id)
            facts = call.facts(generation.counts, clock.now())
            content = encode_sample(generation, question, targets)
        return Answered(content=content, headers=headers_of(target), call=call, facts=facts)

    sample_id = await jobs.start(
        principal.project_id,
        f"tinker:{sampler.seat.sampler_address}:{body.seq_id}",
        request_digest("tinker/asample", body.model_dump_json().encode()),
        work,
    )
    return SampleFuture(
        request_id=sample_id, sample_sequence_ids=[f"{sample_id}-{index}" for index in range(body.num_samples)]
    )


async def _session_of(database: Database, target: Target) -> Session | None:
    if target.version is None:
        return None
    async with database.read() as unit:
        return await unit.sessions.get(target.version.project_id, target.version.session_id)
