"""One session of a plan, as its client lives it: open, submit up to a window of operations, wait, sample."""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httpx

from tests.crash import signed, tinker_wire
from tests.crash.history import Call
from tests.crash.plan import Dialect, Sample, SessionPlan, Step

WINDOW = 8
_POLL_S = 10.0
_OPEN = ("queued", "running")
_NATIVE, _TINKER = "/training/v1", "/tinker/api/v1"

Read = Callable[[httpx.Response], Any]


class Calls(Protocol):
    """What a session needs of the driver."""

    base_model: str
    calm: asyncio.Event
    going: asyncio.Event
    url: str

    async def call(
        self,
        request: httpx.Request,
        call: Call,
        subject: str,
        seq: int = 0,
        *,
        read: Read = ...,
        accept: Callable[[Any], bool] = ...,
        keep: Callable[[Any], Any] = ...,
        alive_at: Callable[[], float] | None = None,
        known: frozenset[int] = ...,
    ) -> Any: ...

    def request(self, method: str, path: str, **parts: Any) -> httpx.Request: ...

    def answered(self, subject: str, answer: Any) -> None: ...


class Contradiction(Exception):
    """Two surfaces tell the same thing differently."""


class PlannedSession(ABC):
    """Sends a plan's steps, several at a time; subclasses know the words."""

    def __init__(self, driver: Calls, plan: SessionPlan) -> None:
        self.driver, self.plan, self.id = driver, plan, ""
        self._slots = asyncio.Semaphore(WINDOW)
        self._final = {step.seq: asyncio.Event() for step in plan.steps}
        self._alive_at = time.monotonic()

    @abstractmethod
    async def open(self) -> bool:
        """Open the session and set ``id``; False: it was refused."""

    @abstractmethod
    async def submit(self, step: Step) -> str | None:
        """Submit an operation and return its id; None: it was refused."""

    @abstractmethod
    async def wait(self, step: Step, id: str) -> None:
        """Wait for an operation's outcome."""

    @abstractmethod
    async def draw(self, sample: Sample, number: int) -> None:
        """Draw a sample, the plan's ``number``-th."""

    async def run(self) -> None:
        if not await self.open():
            return
        self._alive_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, sample in enumerate(self.plan.samples):
                tasks.create_task(self._sample(sample, number), name=sample.key)
            for step in self.plan.steps:
                if step.needs:
                    await self._final[step.needs].wait()
                if step.calm:
                    await self.driver.calm.wait()
                await self.driver.going.wait()
                await self._slots.acquire()
                tasks.create_task(self._operate(step), name=f"{self.plan.name}/{step.seq}")

    def alive_at(self) -> float:
        """When (monotonic) something of the session last became final."""
        return self._alive_at

    async def outcome(self, step: Step, id: str, read: Read) -> Any:
        """Wait for the native document of an operation that is final."""
        return await self.driver.call(
            self.driver.request("GET", f"{_NATIVE}/operations/{id}", params={"wait": _POLL_S}),
            Call.RESULT,
            self.plan.name,
            step.seq,
            read=read,
            accept=lambda operation: operation["status"] not in _OPEN,
            alive_at=self.alive_at,
        )

    async def _operate(self, step: Step) -> None:
        try:
            id = await self.submit(step)
            if id is not None:
                await self.wait(step, id)
        finally:
            self._alive_at = time.monotonic()
            self._slots.release()
            self._final[step.seq].set()

    async def _sample(self, sample: Sample, number: int) -> None:
        if sample.after:
            await self._final[sample.after].wait()
        await self.draw(sample, number)


class NativeSession(PlannedSession):
    """REST; every request carries what makes repeating it safe."""

    async def open(self) -> bool:
        name = self.plan.name
        body = {
            "base_model": self.driver.base_model,
            "name": name,
            "model_package_group": name,
            "lora": self.plan.lora,
        }
        request = self.driver.request("POST", f"{_NATIVE}/sessions", json=body, headers={"Idempotency-Key": name})
        opened = await self.driver.call(request, Call.OPEN, name)
        self.id = "" if opened is None else opened["id"]
        return opened is not None

    async def submit(self, step: Step) -> str | None:
        body = {**step.body, "seq": step.seq}
        request = self.driver.request("POST", f"{_NATIVE}/sessions/{self.id}/{step.verb}", json=body)
        queued = await self.driver.call(request, Call.SUBMIT, self.plan.name, step.seq)
        return None if queued is None else queued["id"]

    async def wait(self, step: Step, id: str) -> None:
        await self.outcome(step, id, httpx.Response.json)

    async def draw(self, sample: Sample, number: int) -> None:
        url, body = "/sample", {**sample.body, "base_model": self.driver.base_model}
        if sample.version is not None:
            url, body = f"/sessions/{self.id}/sample", {**sample.body, "version": sample.version}
        headers = {"Idempotency-Key": sample.key}
        request = self.driver.request("POST", f"{_NATIVE}{url}", json=body, headers=headers)
        await self.driver.call(request, Call.SAMPLE, sample.key)


class SageMakerSession(NativeSession):
    """Opened natively; its operations are submitted and polled in the SageMaker dialect, signed."""

    async def submit(self, step: Step) -> str | None:
        request = signed.submission(self.driver.url, self.plan.name, step)
        queued = await self.driver.call(
            request, Call.SUBMIT, self.plan.name, step.seq, read=lambda answer: signed.acknowledged(answer.json())
        )
        return None if queued is None else queued["id"]

    async def wait(self, step: Step, id: str) -> None:
        await self.driver.call(
            signed.poll(self.driver.url, self.plan.name, id),
            Call.POLL,
            self.plan.name,
            step.seq,
            read=lambda answer: answer.json()["status"],
            accept=lambda status: status not in signed.PENDING,
            keep=lambda status: signed.FINAL[status],
            alive_at=self.alive_at,
        )
        await super().wait(step, id)


class TinkerSession(PlannedSession):
    """The wire of the ``tinker`` SDK. What became of an operation is asked natively, too, and must be the same."""

    _client = ""

    @property
    def _model(self) -> str:
        return f"{self._client}:train:0"

    async def open(self) -> bool:
        name, lora = self.plan.name, {**self.plan.lora}
        del lora["alpha"]
        opened = await self._ask(
            "create_session", {"tags": [], "sdk_version": "0", "display_name": name}, Call.OPEN, name
        )
        if opened is None:
            return False
        self._client = opened["session_id"]
        body = {
            "session_id": self._client,
            "model_seq_id": 0,
            "base_model": self.driver.base_model,
            "lora_config": lora,
        }
        made = await self._ask("create_model", body, Call.OPEN, name)
        self.id = "" if made is None else made["request_id"]
        return made is not None

    async def submit(self, step: Step) -> str | None:
        if step.verb.startswith("forward"):
            headers = {"Content-Type": tinker_wire.PROTOBUF}
            request = self.driver.request(
                "POST", f"{_TINKER}/forward_backward", content=tinker_wire.batch(self._model, step), headers=headers
            )
        else:
            route, body = tinker_wire.work(self._model, step)
            request = self.driver.request("POST", f"{_TINKER}/{route}", json=body)
        queued = await self.driver.call(request, Call.SUBMIT, self.plan.name, step.seq, read=_queued)
        return None if queued is None else queued["id"]

    async def wait(self, step: Step, id: str) -> None:
        told = await self._future(id, self.plan.name, step.seq, tinker_wire.told)
        document = await self.outcome(step, id, self._renamed)
        code = (document["error"] or {}).get("code")
        if told is None or told.get("code") != code:
            raise Contradiction(f"{self.plan.name}/{step.seq}: the future says {told}, the operation {code}")

    async def draw(self, sample: Sample, number: int) -> None:
        if not sample.after:
            body = {
                "session_id": self._client,
                "sampling_session_seq_id": number,
                "base_model": self.driver.base_model,
            }
            await self._ask("create_sampling_session", body, Call.OPEN, sample.key)
        sampler, attempt = f"{self._client}:sample:{sample.after or number}", number
        while True:
            body = tinker_wire.question(sampler, attempt, sample)
            taken = await self._ask("asample", body, Call.FUTURE, sample.key)
            if taken is None:
                return
            id = taken["request_id"]
            answer = await self._future(id, sample.key, attempt, lambda r, id=id: tinker_wire.drawn(r, id, sample))
            if answer is None or answer.get("type") != "lost":
                break
            attempt += len(self.plan.samples)  # samples that share a sampler share its numbers
        if answer is not None and "sequences" not in answer:
            raise Contradiction(f"{sample.key}: a sample ended with {answer}")
        self.driver.answered(sample.key, answer)

    async def _ask(self, route: str, body: Mapping[str, Any], call: Call, subject: str) -> Any:
        return await self.driver.call(self.driver.request("POST", f"{_TINKER}/{route}", json=body), call, subject)

    async def _future(self, id: str, subject: str, seq: int, read: Read) -> Any:
        return await self.driver.call(
            self.driver.request("POST", f"{_TINKER}/retrieve_future", json={"request_id": id}),
            Call.FUTURE,
            subject,
            seq,
            read=read,
            accept=lambda answer: answer.get("type") != "try_again",
            alive_at=self.alive_at,
            known=frozenset({tinker_wire.LOST}),
        )

    def _renamed(self, response: httpx.Response) -> Any:
        """Read a document, with the session's id, which no two runs share, spelled as its name in the plan."""
        return json.loads(json.dumps(response.json()).replace(self.id, self.plan.name))


def _queued(response: httpx.Response) -> Mapping[str, Any]:
    return {"id": response.json()["request_id"]}


SESSIONS: Mapping[Dialect, type[PlannedSession]] = {
    Dialect.NATIVE: NativeSession,
    Dialect.SAGEMAKER: SageMakerSession,
    Dialect.TINKER: TinkerSession,
}
