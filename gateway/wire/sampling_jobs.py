"""Sampling that outlives its request: answered at once with an id, computed here, stored before anybody sees it.

A call runs in the gateway that took it, under a lease in the database that is renewed while it runs there; when that
gateway dies, the call is lost, and says so. An answer, good or bad, is stored in the transaction that records its
usage, and can be read again for 24 h; one that comes after its loss is neither stored nor billed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import orjson
import structlog

from gateway.core.clock import Clock
from gateway.core.codec import decode_outcome, encode_outcome
from gateway.core.errors import Conflict, Exhausted, GatewayError, Kind, Unavailable
from gateway.core.futures import Futures
from gateway.core.ids import ProjectId, SampleId, new_sample_id
from gateway.core.ports import Database, RunningSample, StoredSample
from gateway.core.results import Failure
from gateway.core.usage import UsageFact
from gateway.wire.insisting import RETRY_S
from gateway.wire.metering import Call, record, write_off

LEASE_S = 15.0
RENEW_S = 5.0
_UNNAMED, _FAILURE, _ANSWER = b"\0", b"\1", b"\2"  # the first byte of what is stored; 0 was written before 2 was


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The dialect's own bytes, and the headers that name the weights they came from."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Answer):
    """What a call produced, and the usage to record with it; no ``call``: none."""

    call: Call | None = None
    facts: Sequence[UsageFact] = ()


SampleFutures = Futures[SampleId, StoredSample | RunningSample]
Work = Callable[[SampleId], Awaitable[Answered]]


class SamplingJobs:
    """The calls that run in this process. Use as an async context manager: leaving it gives up what still runs."""

    def __init__(self, database: Database, futures: SampleFutures, clock: Clock, owner: str, *, limit: int) -> None:
        self._database = database
        self._futures = futures
        self._clock = clock
        self._owner = owner
        self._limit = limit
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}
        self._computing: dict[SampleId, asyncio.Future[Answered]] = {}  # what of a task can still be cancelled
        self._renewing: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._log = structlog.stdlib.get_logger("gateway.sampling")

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew(), name="sampling leases")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        renewing = [self._renewing] if self._renewing else []
        for one in (*self._computing.values(), *renewing):
            one.cancel()
        await asyncio.gather(*self._tasks.values(), *renewing, return_exceptions=True)

    async def start(self, project_id: ProjectId, key: str, asked: str, work: Work) -> SampleId:
        """Run ``work`` once under the idempotency ``key``; return the id of the call that the key stands for.

        Raises:
            Conflict: ``idempotency_key_reused``, the key was used for another request.
            Exhausted: ``too_many_samples``, this process runs all it may.
        """
        sample = RunningSample(id=new_sample_id(), key=key, request_digest=asked, owner=self._owner)
        async with self._database.write() as unit:
            known = await unit.samples.by_idempotency_key(project_id, key)
            if known is None:
                if len(self._tasks) >= self._limit:
                    raise Exhausted(
                        f"this gateway already runs {self._limit} samples; try again", code="too_many_samples"
                    )
                known = await unit.samples.begin(project_id, sample, lease_s=LEASE_S)
        if known.request_digest != asked:
            raise Conflict("this sequence number was already used for another request", code="idempotency_key_reused")
        if known.id == sample.id:
            with structlog.contextvars.bound_contextvars(sample_id=sample.id):
                computing = asyncio.ensure_future(work(sample.id))
                task = asyncio.create_task(self._run(project_id, sample.id, computing), name=f"sample-{sample.id}")
            self._tasks[sample.id], self._computing[sample.id] = task, computing
            task.add_done_callback(lambda _: self._tasks.pop(sample.id, None))
        return known.id

    async def wait(self, project_id: ProjectId, sample_id: SampleId, timeout_s: float) -> Answer | Failure | None:
        """Return the answer as soon as it is there; None: it is still being computed after ``timeout_s``.

        Raises:
            NotFound: no such call in the project.
        """
        sample = await self._futures.wait(project_id, sample_id, timeout_s)
        if isinstance(sample, StoredSample):
            return _read(sample.content)
        if sample.lost:
            return Failure(
                kind=Kind.UNAVAILABLE, code="sample_lost", message="the gateway that computed this sample is gone"
            )
        return None

    def cancel(self, sample_id: SampleId) -> None:
        """Stop a call that computes in this process; any other, one whose answer is being stored too, is left as it is.
        Whose it is, the caller has checked."""
        if (computing := self._computing.get(sample_id)) is not None:
            computing.cancel()

    async def _run(self, project_id: ProjectId, sample_id: SampleId, computing: "asyncio.Future[Answered]") -> None:
        try:
            answered = await computing
            content = _ANSWER + orjson.dumps(answered.headers) + b"\n" + answered.content
        except asyncio.CancelledError:
            answered, content = None, _failed(_CANCELLED)
        except GatewayError as error:
            answered, content = None, _failed(_failure_of(error))
        except Exception:
            # The edge of a background task: the caller hears that it is ours to mend, the log hears what.
            self._log.exception("sampling_failed")
            answered, content = None, _failed(_BROKEN)
        finally:
            del self._computing[sample_id]
        await self._end(project_id, sample_id, content, answered)

    async def _end(self, project_id: ProjectId, sample_id: SampleId, content: bytes, answered: Answered | None) -> None:
        while True:
            try:
                async with self._database.write() as unit:
                    stored = await unit.samples.end(project_id, sample_id, content, owner=self._owner)
                    if answered is not None and answered.call is not None:
                        if stored:
                            await record(unit, answered.call, answered.facts, self._clock.now())
                        else:
                            await write_off(unit, answered.call)
                return
            except Unavailable:
                self._log.warning("sample_not_stored")
            if self._leaving.is_set():
                return  # its lease runs out, and then it is lost
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), RETRY_S)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if not self._tasks:
                continue
            try:
                async with self._database.write() as unit:
                    await unit.samples.renew(list(self._tasks), owner=self._owner, lease_s=LEASE_S)
            except Unavailable:
                self._log.warning("sampling_leases_not_renewed")
            except Exception:  # the edge of a background task: without it, all that runs here would be lost
                self._log.exception("sampling_leases_not_renewed")


_CANCELLED = Failure(kind=Kind.CONFLICT, code="sample_cancelled", message="this sample was cancelled")
_BROKEN = Failure(kind=Kind.INTERNAL, code="internal_error", message="something broke on our side while sampling")


def _failure_of(error: GatewayError) -> Failure:
    return Failure(kind=error.kind, code=error.code, message=error.message, field=error.field, details=error.details)


def _failed(failure: Failure) -> bytes:
    return _FAILURE + encode_outcome(failure)


def _read(stored: bytes) -> Answer | Failure:
    tag, rest = stored[:1], stored[1:]
    if tag == _UNNAMED:
        return Answer(content=rest, headers={})
    if tag == _ANSWER:
        names, _, content = rest.partition(b"\n")
        return Answer(content=content, headers=orjson.loads(names))
    failure = decode_outcome(rest)
    assert isinstance(failure, Failure)
    return failure
