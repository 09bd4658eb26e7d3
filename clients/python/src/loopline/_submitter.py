"""Training operations go out one at a time, numbered 1, 2, 3, ... without a hole.

A seq is taken when a submit's turn comes, not when the caller made the call: a refused submit leaves its number to the
next. A call waits for the answer to the submit before it, never for that one's result, so pipelining costs nothing.

Invariant: when it is unknown whether a submit arrived (the answer was lost for good), nothing else goes out until the
session's own record has told which number is free.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from loopline._transport import Transport, new_key, parse, validate
from loopline.errors import ApiError, OperationError, ResultMismatchError
from loopline.results import Billed

B = TypeVar("B", bound=Billed)

PENDING = frozenset({"queued", "running"})
EARLY_POLL_S = 0.25  # a gateway that does not hold the poll is not to be hammered
MAX_POLLS = 4  # held polls per session; operations finish in order, so few suffice


class Operation(BaseModel):
    """What this client reads of an operation."""

    id: str
    session_id: str
    seq: int
    kind: str
    status: str
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, int] = Field(default_factory=dict[str, int])
    cost_nanos: int = 0

    def failure(self) -> OperationError:
        """Return why this operation, which is over, has no result."""
        error = self.error or {}
        return OperationError(
            str(error.get("message") or f"it was {self.status}"),
            operation_type=self.kind,
            operation_id=self.id,
            session_id=self.session_id,
            seq=self.seq,
            code=str(error.get("code") or self.status),
            kind=str(error.get("kind") or "conflict"),
            field=error.get("field"),
            details=error.get("details"),
        )


class Submitter:
    """The one place that numbers a session's operations."""

    def __init__(self, transport: Transport, session_id: str) -> None:
        self._transport = transport
        self._session_id = session_id
        self._turn = asyncio.Lock()  # fair: first come, first served
        self._polls = asyncio.Semaphore(MAX_POLLS)
        self._next_seq = 1
        self._in_doubt = False

    @property
    def last_seq(self) -> int:
        """The last seq known to be taken; 0 before the first."""
        return self._next_seq - 1

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Hold everyone else's submits back; turns are granted in the order they are asked for."""
        async with self._turn:
            yield

    async def submit(self, kind: str, body: bytes) -> Operation:
        """Submit one operation under the next seq. To be called within a turn.

        ``body`` is a JSON object without ``seq``. Exactly one operation results, however often the request is sent.

        Raises:
            ApiError: refused before it was recorded; the seq stays free.
            ConnectionFailed: no answer came.
        """
        if self._in_doubt:
            await self._ask_for_next_seq(kind)
        seq = self._next_seq
        during = f"{kind} (seq {seq} of {self._session_id})"
        numbered = b'{"seq":%d%s%s' % (seq, b"," if len(body) > 2 else b"", body[1:])
        self._in_doubt = True  # until the answer says otherwise; stays so when this is cancelled or fails
        answer = await self._transport.ask(
            "POST",
            f"/sessions/{self._session_id}/{kind}",
            during=during,
            content=numbered,
            idempotency_key=new_key(),
        )
        try:
            operation = parse(Operation, answer.response, during)
        except ApiError as error:
            taken = error.code in ("sequence_reused", "sequence_passed")
            self._in_doubt = answer.ambiguous or taken
            raise
        if operation.seq != seq:
            raise ResultMismatchError(f"{during}: the gateway recorded seq {operation.seq}")
        self._next_seq = seq + 1
        self._in_doubt = False
        return operation

    async def _ask_for_next_seq(self, kind: str) -> None:
        during = f"{kind} of {self._session_id}: asking which seq is next"
        after: int | None = self._next_seq - 1
        while after is not None:
            page = await self._transport.get(
                _Operations, f"/sessions/{self._session_id}/operations", during=during, after_seq=after, limit=100
            )
            if page.data:
                self._next_seq = max(operation.seq for operation in page.data) + 1
            after = self._next_seq - 1 if page.next is not None else None
        self._in_doubt = False

    async def finish(self, operation: Operation, kind: type[B]) -> B:
        """Wait until ``operation`` is over and return its result as a ``kind``.

        Raises:
            OperationError: it failed, was skipped or cancelled.
            ConnectionFailed: the gateway stayed away; the operation goes on without us.
            ResultMismatchError: the result is something else.
        """
        during = f"waiting for {operation.kind} {operation.id} (seq {operation.seq} of {operation.session_id})"
        path, transport = f"/operations/{operation.id}", self._transport
        async with self._polls:
            # Also asked once when the submit's answer already says "completed": that one carries no result.
            while operation.status in PENDING or (operation.status == "completed" and operation.result is None):
                asked = transport.retry.clock()
                operation = await transport.get(Operation, path, during=during, wait=transport.poll_s)
                if operation.status in PENDING and transport.retry.clock() - asked < transport.poll_s / 2:
                    await transport.retry.sleep(EARLY_POLL_S)
                if operation.status == "completed" and operation.result is None:
                    raise ResultMismatchError(f"{during}: completed without a result")
        if operation.result is None:
            raise operation.failure()
        billed = {"usage": operation.usage, "cost_nanos": operation.cost_nanos}
        return validate(kind, {**operation.result, **billed}, during)


class _Operations(BaseModel):
    data: list[Operation]
    next: str | int | None = None
