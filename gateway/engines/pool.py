"""All engines of all base models: who answers, with which version loaded.

A request for a version holds one of its engine's turns and finds the version loaded through the gate; a request for
the base model needs neither. An engine that lost its memory (restart) shows by a broken connection or an unknown
name: what it held is forgotten, and versions come back through the gate when they are next asked for.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import GatewayError, Invalid, Unavailable
from gateway.core.ports import Artifacts, EngineHealth, EngineMetrics, Probes
from gateway.core.sampling import EngineAnswer, Generation, SampleRequest, Target, TokenCounts, check_sample_request
from gateway.core.tracing import Tracer
from gateway.core.validation import check_tokens
from gateway.core.versions import CanaryReport, Check, Occasion, Version, VersionKind, VersionState
from gateway.engines.answers import UnknownAdapter
from gateway.engines.replica import Replica, Unrecorded, Witness
from gateway.engines.special_tokens import SpecialTokens
from gateway.engines.vllm import Vllm

T = TypeVar("T")

ATTEMPTS = 4  # of a request whose version another gateway unloads between our load and the engine's look
_PLAIN_TURN = frozenset({"role", "content", "name"})
_SPECIAL_AROUND = 2  # tokens that a tokenizer puts around a text
_CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlots:
    """How many versions an engine can hold, holds and works with, and the calls that are in flight from here."""

    engine: str
    base_model: str
    capacity: int
    loaded: int
    in_use: int
    calls: int
    waiting: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """What a call asks of an engine at most."""

    sequences: int
    tokens: int


def _size_of(body: Mapping[str, Any]) -> _Size:
    """Read a completion's body. Text counts a token for a character: turns need no exact count."""
    prompts = _rows(body.get("prompt"))
    several = len(prompts) if prompts and not isinstance(prompts[0], int) else 1
    limit: int = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens") or 1
    sequences = several * (body.get("n") or 1)
    asked: Any = body.get("prompt") or body.get("messages") or body.get("input") or ""
    length = sum(len(one) for one in prompts) if several > 1 else len(asked)
    return _Size(sequences, length + sequences * limit)


class EnginePool:
    """The Engines port over vLLM servers. Use as an async context manager."""

    def __init__(
        self,
        catalog: Catalog,
        artifacts: Artifacts,
        *,
        key: str,
        timeout_s: float,
        sequences: int = 64,
        clock: Clock | None = None,
        witness: Witness | None = None,
        probes: Probes | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        now, witness = (clock or SystemClock()).now, witness or _unheard
        self._open = AsyncExitStack()
        self._empty_chats: dict[str, int] = {}  # tokens of one, by base model
        self._special = {base.name: SpecialTokens.of(base.path) for base in catalog.models.values()}
        self._replicas: Mapping[str, tuple[Replica, ...]] = {
            base.name: tuple(
                Replica(
                    Vllm(url, key=key, timeout_s=timeout_s, tracer=tracer),
                    base,
                    artifacts,
                    probes or Unrecorded(),
                    now=now,
                    witness=witness,
                    sequences=sequences,
                )
                for url in base.engines
            )
            for base in catalog.models.values()
        }

    async def __aenter__(self) -> Self:
        for replicas in self._replicas.values():
            for replica in replicas:
                await self._open.enter_async_context(replica.engine)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def generate(self, target: Target, request: SampleRequest, stop: asyncio.Event | None = None) -> Generation:
        check_sample_request(request, target.base)

        async def ask(replica: Replica, model: str) -> Generation:
            return await _generate(replica.engine, model, target, request, stop)

        length = len(request.prompt)
        limit = request.params.max_tokens
        most = target.base.context_length - length if limit is None else limit
        return await self._answer(target, ask, _Size(request.num_samples, length + request.num_samples * most))

    async def complete(
        self, target: Target, route: str, body: Mapping[str, Any], stop: asyncio.Event | None = None
    ) -> EngineAnswer:
        _check_ids(body, target.base)
        body = self._special[target.base.name].in_body(body)

        async def ask(replica: Replica, model: str) -> EngineAnswer:
            return await replica.engine.complete(model, route, body, stop)

        return await self._answer(target, ask, _size_of(body))

    async def stream(
        self, target: Target, route: str, body: Mapping[str, Any], stop: asyncio.Event
    ) -> AsyncGenerator[EngineAnswer]:
        """Chunks carry ``usage`` so far; the last has no choices and the total, also when the caller did not ask."""
        _check_ids(body, target.base)
        body = self._special[target.base.name].in_body(body)
        replica, size = self._choose(_checked(target)), _size_of(body)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with (
                    replica.turn(target, sequences=size.sequences, tokens=size.tokens),
                    replica.serving(target.version) as model,
                    aclosing(replica.engine.stream(model, route, body, stop)) as chunks,
                ):
                    async for chunk in chunks:
                        yield chunk
                return
            except UnknownAdapter:
                _forget(replica, target)
                if attempt == ATTEMPTS:
                    raise

    async def most_tokens(self, target: Target, body: Mapping[str, Any]) -> int:
        """A token is at least a byte of text, and around a turn a chat template puts no more than it makes of an empty
        conversation; where it renders more than turns, the tokens are counted."""
        base = target.base
        if "messages" not in body:
            return len(body["prompt"].encode()) + _SPECIAL_AROUND
        turns: Sequence[Mapping[str, Any]] = self._special[base.name].in_body(body)["messages"]
        if len(body) > 1 or not all(turn.keys() <= _PLAIN_TURN for turn in turns):
            return len(await self.tokenize(target, body))
        if base.name not in self._empty_chats:
            empty = {"messages": [{"role": "user", "content": ""}]}
            self._empty_chats[base.name] = len(await self.tokenize(target, empty))
        text = sum(len(value.encode()) for turn in turns for value in turn.values())
        return text + (len(turns) + 1) * self._empty_chats[base.name]

    async def tokenize(self, target: Target, body: Mapping[str, Any]) -> Sequence[int]:
        """Several prompts in one body are returned one after the other."""
        engine = self._choose(target.base).engine
        if "messages" in body:
            body = self._special[target.base.name].in_body(body)
            return await engine.tokenize(target.base.name, {name: body[name] for name in _CHAT_FIELDS if name in body})
        prompt: Any = body.get("prompt", "")
        prompts = _rows(prompt) if isinstance(prompt, list) else [prompt]
        tokens: list[int] = []
        for part in prompts:
            if isinstance(part, int):
                tokens.append(part)
            elif isinstance(part, list):
                tokens += _rows(part)
            else:
                tokens += await engine.tokenize(target.base.name, {"prompt": part})
        return tokens

    async def publish(self, version: Version) -> CanaryReport:
        """Return the report with the largest difference. Engines that are away load the version when it is first
        asked of them, through the same gate.

        Raises:
            Unavailable: no engine was reached.
        """
        replicas = self._replicas.get(version.base_model, ())
        outcomes = await asyncio.gather(
            *(replica.admit(version, Occasion.PUBLISH) for replica in replicas), return_exceptions=True
        )
        away = Unavailable(f"no engine of {version.base_model} is up", code="engine_lost")
        reports: list[CanaryReport] = []
        for outcome in outcomes:
            match outcome:
                case CanaryReport():
                    reports.append(outcome)
                case Unavailable():
                    away = outcome
                case _:
                    raise outcome
        if not reports:
            raise away
        return max(reports, key=lambda report: report.max_difference)

    async def verify(self, version: Version) -> Sequence[Check]:
        """As the port says. An engine that is away has nothing loaded that could be wrong."""
        replicas = self._replicas.get(version.base_model, ())
        outcomes = await asyncio.gather(*(replica.verify(version) for replica in replicas), return_exceptions=True)
        away = Unavailable(f"no engine of {version.base_model} is up", code="engine_lost")
        checks: list[Check] = []
        for outcome in outcomes:
            match outcome:
                case Check():
                    checks.append(outcome)
                case Unavailable():
                    away = outcome
                case _:
                    raise outcome
        if not checks:
            raise away
        return checks

    def share(self, among: int) -> None:
        for replicas in self._replicas.values():
            for replica in replicas:
                replica.share(among)

    def in_use(self, version: Version) -> bool:
        return any(replica.in_use(version.id) for replica in self._replicas.get(version.base_model, ()))

    async def held(self) -> frozenset[str]:
        replicas = [replica for replicas in self._replicas.values() for replica in replicas]
        outcomes = await asyncio.gather(*(replica.held() for replica in replicas), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, GatewayError):
                raise outcome
        return frozenset(name for names in outcomes if isinstance(names, frozenset) for name in names)

    async def release(self, version: Version) -> bool:
        """As the port says. An engine that cannot be asked may still read the files."""
        replicas = self._replicas.get(version.base_model, ())
        outcomes = await asyncio.gather(*(replica.release(version) for replica in replicas), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, GatewayError):
                raise outcome
        return all(outcome is True for outcome in outcomes)

    async def health(self, base: BaseModel) -> Sequence[EngineHealth]:
        replicas = self._replicas.get(base.name, ())
        ready = await asyncio.gather(*(replica.engine.healthy() for replica in replicas))
        for replica, answered in zip(replicas, ready, strict=True):
            replica.lost = not answered
        return [
            EngineHealth(url=replica.engine.url, ready=answered, adapters=len(replica.loaded))
            for replica, answered in zip(replicas, ready, strict=True)
        ]

    def slots(self) -> Sequence[EngineSlots]:
        """Return how full every engine is, as this process knows it."""
        return [
            EngineSlots(
                engine=replica.engine.url,
                base_model=replica.base.name,
                capacity=replica.loaded.capacity,
                loaded=len(replica.loaded),
                in_use=replica.versions_in_use,
                calls=replica.in_flight,
                waiting=replica.gate.waiting,
            )
            for replicas in self._replicas.values()
            for replica in replicas
        ]

    async def metrics(self) -> Sequence[EngineMetrics]:
        replicas = [replica for replicas in self._replicas.values() for replica in replicas]
        texts = await asyncio.gather(*(replica.engine.metrics() for replica in replicas), return_exceptions=True)
        return [
            EngineMetrics(url=replica.engine.url, base_model=replica.base.name, text=text)
            for replica, text in zip(replicas, texts, strict=True)
            if isinstance(text, str)
        ]

    def _choose(self, base: BaseModel) -> Replica:
        """The least busy engine; one that was lost only when all were."""
        replicas = self._replicas.get(base.name, ())
        if not replicas:
            raise Unavailable(f"no engine serves {base.name}", code="no_engine")
        return min(replicas, key=lambda replica: (replica.lost, replica.in_flight + replica.gate.waiting))

    async def _answer(self, target: Target, ask: Callable[[Replica, str], Awaitable[T]], size: _Size) -> T:
        replica = self._choose(_checked(target))
        async with replica.turn(target, sequences=size.sequences, tokens=size.tokens):
            for _ in range(1, ATTEMPTS):
                try:
                    async with replica.serving(target.version) as model:
                        return await ask(replica, model)
                except UnknownAdapter:
                    _forget(replica, target)
            async with replica.serving(target.version) as model:
                return await ask(replica, model)


async def _unheard(version: Version, check: Check) -> None:
    """The witness of a pool that has none."""


def _forget(replica: Replica, target: Target) -> None:
    if target.version is not None:
        replica.loaded.forget(target.version.id)


def _checked(target: Target) -> BaseModel:
    version = target.version
    if version is not None:
        if version.kind is not VersionKind.ADAPTER or version.base_model != target.base.name:
            raise Invalid(f"{version.address} is no adapter of {target.base.name}", code="not_an_adapter")
        if version.state is VersionState.REJECTED:
            raise Invalid(f"{version.address} was rejected by the publish gate", code="version_rejected")
    return target.base


def _check_ids(body: Mapping[str, Any], base: BaseModel) -> None:
    """Token ids in a passed-through body are checked like those of a sampling request."""
    rows = _rows(body.get("prompt"))
    if rows and isinstance(rows[0], int):
        check_tokens(rows, base, field="prompt")
    for index, row in enumerate(rows):
        if isinstance(row, list):
            check_tokens(_rows(row), base, field=f"prompt[{index}]")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_tokens(body.get(name) or (), base, field=name)
    check_tokens([int(token) for token in body.get("logit_bias") or ()], base, field="logit_bias")


def _rows(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


async def _generate(
    engine: Vllm, model: str, target: Target, request: SampleRequest, stop: asyncio.Event | None
) -> Generation:
    """Where the engine leaves a LoRA on lm_head out of its prompt scores, they are computed token by token."""
    inexact = target.version is not None and target.version.lora.train_unembed and not engine.exact_prompt_scores
    length = target.base.context_length
    if not (inexact and (request.prompt_logprobs or request.topk_prompt_logprobs)):
        return await engine.generate(model, request, context_length=length, stop=stop)
    if request.topk_prompt_logprobs:
        raise Invalid(
            "topk_prompt_logprobs of a version with a trained unembedding are not available on this engine",
            code="topk_prompt_logprobs_unavailable",
            field="topk_prompt_logprobs",
        )
    plain = dataclasses.replace(request, prompt_logprobs=False)
    generation = await engine.generate(model, plain, context_length=length, stop=stop)
    counts = generation.counts

    def count(more: TokenCounts) -> None:
        nonlocal counts
        counts = dataclasses.replace(
            counts,
            extra_prompt=counts.extra_prompt + more.extra_prompt,
            extra_sampled=counts.extra_sampled + more.extra_sampled,
        )

    scores = await engine.score_by_generating(model, request.prompt, count)
    return dataclasses.replace(generation, prompt_logprobs=(None, *scores), counts=counts)
