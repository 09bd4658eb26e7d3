"""Answers in one piece: ask, record what was consumed, then answer. An Idempotency-Key returns the first answer."""

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response
from pydantic import BaseModel

from gateway.core.costs import cost_nanos
from gateway.core.counts import counts_of, response_counts
from gateway.core.errors import Invalid
from gateway.core.ports import StoredSample
from gateway.core.sampling import EngineAnswer, TokenCounts
from gateway.wire.client_watch import ClientWatch
from gateway.wire.deps import IdempotencyKey
from gateway.wire.idempotency import FirstAnswers, keep_answer, request_digest, stored_answer
from gateway.wire.metering import cost_headers, held, record
from gateway.wire.openai.admission import RESPONSES, Admission, AdmissionDep, Admitted
from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.openai.chunks import ChoiceChunks
from gateway.wire.openai.response_events import ResponseEvents, response_read, response_usage
from gateway.wire.openai.response_schemas import ResponseCreate
from gateway.wire.openai.schemas import CompletionCreate
from gateway.wire.openai.streaming import streamed
from gateway.wire.openai.translate import answer

Asked = ChatCreate | CompletionCreate | ResponseCreate


class Answerer:
    """Answers one request, streamed or in one piece."""

    def __init__(
        self, admission: Admission, first_answers: FirstAnswers, idempotency_key: str | None, client: ClientWatch
    ) -> None:
        self._admission = admission
        self._client = client
        self._first_answers = first_answers
        self._key = idempotency_key

    async def answer(self, asked: Asked) -> Response:
        """Raises Invalid, NotFound, Conflict, Unavailable."""
        if asked.stream:
            if self._key is not None:
                raise Invalid("an Idempotency-Key is not available for streams", field="Idempotency-Key")
            admitted = await self._admit(asked)
            reading = ResponseEvents if isinstance(asked, ResponseCreate) else ChoiceChunks
            return await streamed(
                self._admission, admitted, reading(admitted, int(self._admission.clock.now().timestamp()))
            )
        if self._key is None:
            return _response(await self._compute(await self._admit(asked), None))
        project_id, digest = self._admission.principal.project_id, _digest(asked)
        async with self._first_answers.turn(project_id, self._key):
            stored = await stored_answer(self._admission.database, project_id, self._key, digest)
            if stored is None:
                stored = await self._compute(await self._admit(asked), digest)
        return _response(stored)

    async def _admit(self, asked: Asked) -> Admitted:
        match asked:
            case ChatCreate():
                return await self._admission.chat(asked)
            case CompletionCreate():
                return await self._admission.completion(asked)
            case ResponseCreate():
                return await self._admission.response(asked)

    async def _compute(self, admitted: Admitted, digest: str | None) -> bytes:
        """Return a line with the headers, then the body: what a repeated key answers with."""
        admission, call = self._admission, admitted.call
        async with (
            held(admission.database, call, admission.clock) as notices,
            self._client.watched(wanted_later=self._key is not None or not admitted.can_stop) as stop,
        ):
            answered = await admission.engines.complete(admitted.target, admitted.route, admitted.body, stop)
            counts = _counts(admitted, answered)
            if admitted.scoring:
                counts = counts.without_sampled()
            now = admission.clock.now()
            facts = call.facts(counts, now)
            cost = cost_nanos(admission.prices, facts)
            body = _body(admitted, answered.document, counts, cost, int(now.timestamp()))
            headers = {**admitted.headers, **cost_headers(cost, notices)}
            content = orjson.dumps(headers) + b"\n" + orjson.dumps(body)
            if self._key is None or digest is None:
                await admission.database.apply(lambda unit: record(unit, call, facts, at=now))
                return content
            sample = StoredSample(id=admitted.sample_id, key=self._key, request_digest=digest, content=content)
            async with admission.database.write() as unit:
                kept = await keep_answer(unit, admission.principal.project_id, sample)
                if kept is not content:  # another gateway answered first; that answer was paid for, this one is not
                    facts = call.facts(counts.unbilled(), now)
                await record(unit, call, facts, at=now)
        return kept


def _counts(admitted: Admitted, answered: EngineAnswer) -> TokenCounts:
    if admitted.route == RESPONSES:
        found = response_counts(answered.document, engine=answered.engine)
        return found or TokenCounts(engine=answered.engine, prompt=0, cached=0, sampled=0)
    return counts_of(answered.document["usage"], engine=answered.engine, samples=admitted.samples)


def _body(
    admitted: Admitted, document: Mapping[str, Any], counts: TokenCounts, cost: int, created: int
) -> Mapping[str, Any]:
    if admitted.route == RESPONSES:
        return response_read(admitted, document, created, response_usage(counts, cost))
    return answer(admitted, document, counts, cost, created)


def _response(stored: bytes) -> Response:
    headers, _, content = stored.partition(b"\n")
    return Response(content, media_type="application/json", headers=orjson.loads(headers))


def _digest(asked: BaseModel) -> str:
    return request_digest(f"openai/{type(asked).__name__}", asked.model_dump_json().encode())


async def _answerer(request: Request, admission: AdmissionDep, idempotency_key: IdempotencyKey) -> Answerer:
    return Answerer(admission, request.state.first_answers, idempotency_key, ClientWatch(request))


AnswererDep = Annotated[Answerer, Depends(_answerer)]
