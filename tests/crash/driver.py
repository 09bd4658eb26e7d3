"""The client: submits a plan's operations over several connections, retries blindly, waits, samples, writes it down.

Every operation carries its ``seq``, so a retry is safe, and the server must see to it that it is. Up to ``WINDOW``
operations of a session are under way at once and arrive in any order.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.crash import signed
from tests.crash.history import Call, Event, History, Kind
from tests.crash.plan import Plan, Sample, SessionPlan, Step
from tests.wire.signing import Signed

WINDOW = 8
STUCK_S = 120.0
_PAUSE_S = (0.02, 0.2)
_POLL_S = 10.0
_OPEN = ("queued", "running")


class Stuck(Exception):
    """A call had no definite answer, or nothing of a session became final, for ``STUCK_S`` seconds."""


def _any(_: Mapping[str, Any]) -> bool:
    return True


class Driver:
    """Runs one plan against one address.

    ``final`` counts operations whose result is known; ``calm`` is set by whoever strikes, when the strikes are over.
    ``excused`` says until when (monotonic) nobody could expect an answer: patience begins there.
    """

    def __init__(
        self,
        *,
        url: str,
        key: str,
        base_model: str,
        history: History,
        seed: int,
        excused: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.final = 0
        self.calm = asyncio.Event()
        self.base_model = base_model
        self.url = url
        self.signed = Signed(key)
        self._headers = {"Authorization": f"Bearer {key}"}
        self._history = history
        self._excused = excused
        self._rng = random.Random(seed)
        self._started = time.monotonic()

    def note(self, subject: str, value: Any = None) -> None:
        """Write down what is done to the stack."""
        self._record(Kind.NOTE, Call.FAULT, subject, 0, value)

    async def run(self, plan: Plan) -> None:
        """Return when every operation is final and every sample answered.

        Raises:
            ExceptionGroup of Stuck: a future did not end.
        """
        async with (
            httpx.AsyncClient(
                base_url=f"{self.url}/training/v1", headers=self._headers, timeout=30.0, trust_env=False
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for session in plan.sessions:
                tasks.create_task(_Session(self, client, session).run(), name=session.name)

    async def call(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        call: Call,
        subject: str,
        seq: int = 0,
        *,
        accept: Callable[[Mapping[str, Any]], bool] = _any,
        read: Callable[[Mapping[str, Any]], Any] = dict,
        alive_at: Callable[[], float] | None = None,
    ) -> Any:
        """Send ``request`` until there is a definite answer that ``accept`` takes; None when it is a refusal.

        Args:
            read: makes of the answer what the history keeps.
            alive_at: when (monotonic) the session last made progress; patience is counted from there.

        Raises:
            Stuck: see there.
        """
        began = time.monotonic()
        while True:
            self._record(Kind.INVOKE, call, subject, seq)
            try:
                auth = self.signed if "/sagemaker/" in request.url.path else None
                response = await client.send(request, auth=auth)
            except httpx.TransportError as error:
                self._record(Kind.UNKNOWN, call, subject, seq, type(error).__name__)
            else:
                if response.status_code < 300:
                    if accept(document := response.json()):
                        return self._record(Kind.OK, call, subject, seq, read(document))
                elif response.status_code < 500 and response.status_code != 429:
                    self._record(Kind.FAIL, call, subject, seq, response.text)
                    return None
                else:
                    self._record(Kind.UNKNOWN, call, subject, seq, f"{response.status_code} {response.text[:300]}")
            if time.monotonic() - max(began, alive_at() if alive_at else 0.0, self._excused()) > STUCK_S:
                raise Stuck(f"{subject}/{seq}: {call.value} has had no answer for {STUCK_S:g} s")
            await asyncio.sleep(self._rng.uniform(*_PAUSE_S))

    def _record(self, kind: Kind, call: Call, subject: str, seq: int, value: Any = None) -> Any:
        at = time.monotonic() - self._started
        self._history.add(Event(at=at, kind=kind, call=call, subject=subject, seq=seq, value=value))
        if kind is Kind.OK and call is Call.RESULT:
            self.final += 1
        return value


class _Session:
    """One session of the plan."""

    def __init__(self, driver: Driver, client: httpx.AsyncClient, plan: SessionPlan) -> None:
        self._driver = driver
        self._client = client
        self._plan = plan
        self._slots = asyncio.Semaphore(WINDOW)
        self._final = {step.seq: asyncio.Event() for step in plan.steps}
        self._alive_at = time.monotonic()
        self._id = ""

    async def run(self) -> None:
        name = self._plan.name
        body = {
            "base_model": self._driver.base_model,
            "name": name,
            "model_package_group": name,
            "lora": self._plan.lora,
        }
        request = self._client.build_request("POST", "/sessions", json=body, headers={"Idempotency-Key": name})
        opened = await self._driver.call(self._client, request, Call.OPEN, name)
        if opened is None:
            return
        self._id, self._alive_at = opened["id"], time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for sample in self._plan.samples:
                tasks.create_task(self._sample(sample), name=sample.key)
            for step in self._plan.steps:
                if step.needs:
                    await self._final[step.needs].wait()
                if step.calm:
                    await self._driver.calm.wait()
                await self._slots.acquire()
                tasks.create_task(self._operate(step), name=f"{name}/{step.seq}")

    async def _operate(self, step: Step) -> None:
        try:
            queued = await (self._submit_signed(step) if self._plan.signed else self._submit(step))
            if queued is not None:
                poll = self._client.build_request("GET", f"/operations/{queued['id']}", params={"wait": _POLL_S})
                await self._driver.call(
                    self._client,
                    poll,
                    Call.RESULT,
                    self._plan.name,
                    step.seq,
                    accept=lambda operation: operation["status"] not in _OPEN,
                    alive_at=lambda: self._alive_at,
                )
        finally:
            self._alive_at = time.monotonic()
            self._slots.release()
            self._final[step.seq].set()

    async def _submit(self, step: Step) -> Any:
        url, body = f"/sessions/{self._id}/{step.verb}", {**step.body, "seq": step.seq}
        request = self._client.build_request("POST", url, json=body)
        return await self._driver.call(self._client, request, Call.SUBMIT, self._plan.name, step.seq)

    async def _submit_signed(self, step: Step) -> Any:
        """Submit in the other dialect, and poll there until the operation is final."""
        name, url = self._plan.name, self._driver.url
        queued = await self._driver.call(
            self._client,
            signed.submission(url, name, step),
            Call.SUBMIT,
            name,
            step.seq,
            read=signed.acknowledged,
        )
        if queued is not None:
            await self._driver.call(
                self._client,
                signed.poll(url, name, queued["id"]),
                Call.POLL,
                name,
                step.seq,
                accept=lambda answer: answer["status"] not in signed.PENDING,
                read=lambda answer: signed.FINAL[answer["status"]],
                alive_at=lambda: self._alive_at,
            )
        return queued

    async def _sample(self, sample: Sample) -> None:
        url, body = "/sample", {**sample.body, "base_model": self._driver.base_model}
        if sample.version is not None:
            await self._final[sample.after].wait()
            url, body = f"/sessions/{self._id}/sample", {**sample.body, "version": sample.version}
        request = self._client.build_request("POST", url, json=body, headers={"Idempotency-Key": sample.key})
        await self._driver.call(self._client, request, Call.SAMPLE, sample.key)
