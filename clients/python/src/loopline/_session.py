"""One session's calls as they run on the background loop: submitted in the order made, results gathered later."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from loopline._batch import Chunk, cut, join, shifted
from loopline._connection import Connection
from loopline._custom_loss import CustomLoss, surrogate
from loopline._submitter import Operation, Submitter
from loopline.errors import ApiError, IncompleteGradient, OperationError
from loopline.futures import APIFuture
from loopline.results import Billed, ForwardBackwardOutput, OptimStepResponse, Session
from loopline.types import Datum

T = TypeVar("T")
B = TypeVar("B", bound=Billed)

STOP_S = 15.0  # stopping must not hang a program that wants to end


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user's: its place in the order of calls, and where its operations' ids go."""

    number: int
    ids: Future[tuple[str, ...]] = field(default_factory=Future[tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class _Broken:
    """A backward pass that did not arrive whole, and the newest call that was made before that was known."""

    newest_call: int
    reason: str


class SessionCalls:
    """Begins calls and carries them out.

    Invariant: an ``optim_step`` called in the belief that the ``forward_backward`` before it would arrive is not sent
    when that one did not. So pipelining never steps on a partial gradient.
    """

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection = connection
        self._session_id = session_id
        self._submitter = Submitter(connection.transport, session_id)
        self._order = threading.Lock()
        self._newest_call = 0
        self._broken: _Broken | None = None

    @property
    def last_seq(self) -> int:
        """The last seq the session has taken; 0 before the first."""
        return self._submitter.last_seq

    def begin(self, work: Callable[[Call], Awaitable[T]]) -> APIFuture[T]:
        """Start ``work`` behind all calls begun before it, and return at once."""

        async def run(call: Call) -> T:
            return await work(call)

        with self._order:
            self._newest_call += 1
            call = Call(self._newest_call)
            outcome = self._connection.loop.start(run(call))
        return APIFuture(outcome, call.ids, self._connection)

    async def forward(self, call: Call, chunks: Sequence[Chunk]) -> ForwardBackwardOutput:
        async with self._submitter.turn():
            operations = await self._submit("forward", chunks)
        call.ids.set_result(_ids(operations))
        return await self._outputs(operations, chunks)

    async def forward_backward(self, call: Call, chunks: Sequence[Chunk]) -> ForwardBackwardOutput:
        async with self._submitter.turn():
            operations = await self._submit_backward(chunks)
        call.ids.set_result(_ids(operations))
        return await self._outputs(operations, chunks)

    async def custom(
        self, call: Call, datums: Sequence[Datum], chunks: Sequence[Chunk], loss: CustomLoss
    ) -> ForwardBackwardOutput:
        # The turn is held across both passes: what was called later must come after the backward pass.
        async with self._submitter.turn():
            whole = False
            try:
                forward = await self._outputs(await self._submit("forward", chunks), chunks)
                backward, value, metrics = await asyncio.to_thread(surrogate, datums, forward, loss)
                chunks = cut(backward, "cross_entropy", None)
                operations = await self._submit_backward(chunks)
                whole = True
            finally:
                if not whole:
                    self._mark_broken("forward_backward_custom failed before its backward pass was accepted")
        call.ids.set_result(_ids(operations))
        output = await self._outputs(operations, chunks)
        usage = dict(forward.usage)
        for meter, quantity in output.usage.items():
            usage[meter] = usage.get(meter, 0) + quantity
        return ForwardBackwardOutput(
            loss_fn_outputs=forward.loss_fn_outputs,
            metrics={**metrics, "loss:sum": value, "surrogate_loss:sum": output.metrics["loss:sum"]},
            usage=usage,
            cost_nanos=forward.cost_nanos + output.cost_nanos,
        )

    async def optim_step(self, call: Call, body: bytes) -> OptimStepResponse:
        async with self._submitter.turn():
            broken, self._broken = self._broken, None
            if broken is not None and call.number <= broken.newest_call:
                raise IncompleteGradient(f"optim_step of {self._session_id} was not sent: {broken.reason}")
            operation = await self._submitter.submit("optim_step", body)
        call.ids.set_result((operation.id,))
        return await self._submitter.finish(operation, OptimStepResponse)

    async def single(self, call: Call, kind: str, body: bytes, result: type[B]) -> B:
        """Carry out one operation of ``kind`` whose answer is a ``result``."""
        async with self._submitter.turn():
            operation = await self._submitter.submit(kind, body)
        call.ids.set_result((operation.id,))
        return await self._submitter.finish(operation, result)

    async def stop(self) -> None:
        """Let earlier submits out, then stop the session.

        Raises:
            TimeoutError: that took longer than STOP_S.
        """
        during = f"stop of {self._session_id}"
        async with asyncio.timeout(STOP_S), self._submitter.turn():
            await self._connection.transport.delete(Session, f"/sessions/{self._session_id}", during=during)

    async def _submit(self, kind: str, chunks: Sequence[Chunk]) -> list[Operation]:
        operations: list[Operation] = []
        for chunk in chunks:
            try:
                operations.append(await self._submitter.submit(kind, chunk.body))
            except ApiError as error:
                raise shifted(error, chunk.first) from error
        return operations

    async def _submit_backward(self, chunks: Sequence[Chunk]) -> list[Operation]:
        whole = False
        try:
            operations = await self._submit("forward_backward", chunks)
            whole = True
        finally:
            if not whole:
                self._mark_broken(
                    "the forward_backward before it was not accepted as a whole. What was accepted since the last "
                    "optim_step is still accumulated; call optim_step again to step on it"
                )
        return operations

    def _mark_broken(self, reason: str) -> None:
        self._broken = _Broken(self._newest_call, reason)

    async def _outputs(self, operations: Sequence[Operation], chunks: Sequence[Chunk]) -> ForwardBackwardOutput:
        finished = await asyncio.gather(
            *(self._output(operation, chunk) for operation, chunk in zip(operations, chunks, strict=True))
        )
        return join(finished, [chunk.size for chunk in chunks])

    async def _output(self, operation: Operation, chunk: Chunk) -> ForwardBackwardOutput:
        try:
            return await self._submitter.finish(operation, ForwardBackwardOutput)
        except OperationError as error:
            raise shifted(error, chunk.first) from error


def _ids(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(operation.id for operation in operations)
