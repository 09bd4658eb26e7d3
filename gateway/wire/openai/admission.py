"""From a request to what an engine is asked: who answers, does it fit, every sampling field said explicitly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Request

from gateway.core.addresses import parse_address
from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Invalid, NotFound
from gateway.core.ids import SampleId, SessionId, new_sample_id
from gateway.core.limits import Allowance, Limit
from gateway.core.ports import Database, Engines, Grammars, Prices
from gateway.core.principals import Principal
from gateway.core.sampling import Target
from gateway.core.sessions import Session
from gateway.core.validation import check_tokens
from gateway.wire.deps import InferenceCaller, Tag, asking_session
from gateway.wire.metering import Call
from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.openai.constraints import engine_constraints, engine_text_format
from gateway.wire.openai.conversation import engine_messages, engine_tools, template_arguments
from gateway.wire.openai.response_schemas import ResponseCreate
from gateway.wire.openai.sampling import (
    best_of,
    chat_limit,
    check_generation,
    check_sampling,
    fitting,
    generation,
    samples_of,
    sampling,
)
from gateway.wire.openai.schemas import CompletionCreate, Prompt, SamplingCreate
from gateway.wire.targets import find_session, find_target, headers_of, session_target

RESPONSES = "responses"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the older route


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that may run. ``body`` is complete but for ``model`` and ``stream``."""

    sample_id: SampleId
    model: str  # as the caller wrote it
    target: Target
    session_id: SessionId | None
    route: str
    body: Mapping[str, Any]
    prompts: tuple[int, ...]  # their lengths in tokens; of a single one perhaps more
    samples: int  # sequences for each prompt
    scoring: bool  # the one token that an engine generates to score a prompt is nobody's bill
    include_usage: bool
    return_token_ids: bool
    metadata: Mapping[str, str] | None
    call: Call
    keep: int | None = None  # of the samples of a prompt, the likeliest; None: all
    show_logprobs: bool = True

    @property
    def can_stop(self) -> bool:
        """Whether an engine that is stopped in an answer of one piece can say how far each sequence came: with
        ``echo`` it returns no token ids."""
        return bool(self.body.get("return_token_ids")) or len(self.prompts) * self.samples == 1

    @property
    def headers(self) -> dict[str, str]:
        """The exact weights that answer."""
        return headers_of(self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Admits the requests of one caller."""

    principal: Principal
    database: Database
    engines: Engines
    grammars: Grammars
    catalog: Catalog
    prices: Prices
    clock: Clock
    tag: str | None
    allowance: Allowance
    asking_session: Session | None

    async def chat(self, asked: ChatCreate) -> Admitted:
        """Admit a chat completion.

        Raises:
            Invalid, NotFound, Conflict: see ``find_model`` and ``fitting``.
        """
        limit, field = chat_limit(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Invalid("top_logprobs needs logprobs to be true", field="top_logprobs")
        if limit == 0:
            raise Invalid("max_tokens must be at least 1", field=field)
        messages, arguments = engine_messages(asked.messages), template_arguments(asked)
        target, session = await self.find_model(asked.model)
        tools = engine_tools(asked, target.base)
        constraints = await engine_constraints(self.grammars, asked, tools)
        conversation: dict[str, Any] = {"messages": messages}
        if tools:
            conversation["tools"] = tools["tools"]
        if arguments:
            conversation["chat_template_kwargs"] = arguments
        length = await self._length(target, conversation, limit)
        room = fitting(target, length, limit, prompt_field="messages", limit_field=field)
        body = {
            **conversation,
            **tools,
            **constraints,
            "max_completion_tokens": room if limit is None else limit,
            "logprobs": bool(asked.logprobs),
            "top_logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
            "add_generation_prompt": True,
            "add_special_tokens": False,
        }
        return self._admitted(asked, target, session, "chat/completions", body, [length], echo=False)

    async def completion(self, asked: CompletionCreate) -> Admitted:
        """Admit a completion.

        Raises:
            Invalid, NotFound, Conflict: see ``find_model`` and ``fitting``.
        """
        if asked.max_tokens == 0 and not asked.echo:
            raise Invalid("max_tokens may be 0 only with echo, to score the prompt", field="max_tokens")
        if asked.echo and asked.return_token_ids:
            raise Invalid("return_token_ids is not available with echo", field="return_token_ids")
        kept = best_of(asked)
        target, session = await self.find_model(asked.model)
        constraints = await engine_constraints(self.grammars, asked, {})
        wanted = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        lengths = await self._prompt_lengths(target, asked.prompt, wanted)
        longest = max(lengths)
        room = fitting(target, longest, asked.max_tokens, prompt_field="prompt", limit_field="max_tokens")
        limit = min(DEFAULT_COMPLETION_TOKENS, room) if asked.max_tokens is None else asked.max_tokens
        body = {
            "prompt": asked.prompt[0] if len(asked.prompt) == 1 else asked.prompt,
            **constraints,
            "max_tokens": limit,
            "logprobs": 0 if asked.logprobs is None and kept is not None else asked.logprobs,
            "echo": bool(asked.echo),
            "add_special_tokens": True,
        }
        admitted = self._admitted(asked, target, session, "completions", body, lengths, echo=bool(asked.echo))
        return replace(admitted, keep=asked.n or 1, show_logprobs=asked.logprobs is not None)

    async def response(self, asked: ResponseCreate) -> Admitted:
        """Admit a response.

        Raises:
            Invalid, NotFound, Conflict: see ``find_model`` and ``fitting``.
        """
        target, session = await self.find_model(asked.model)
        turns = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        turns += [
            {"role": "system" if item.role == "developer" else item.role, "content": item.text} for item in asked.input
        ]
        text = await engine_text_format(self.grammars, asked)
        limit, field = asked.max_output_tokens, "max_output_tokens"
        length = await self._length(target, {"messages": turns}, limit)
        room = fitting(target, length, limit, prompt_field="input", limit_field=field)
        limit = room if limit is None else limit
        check_generation(asked, target)
        self.allowance.check(Limit.TOKENS_OUT, limit, name=field)
        body = {
            "input": [{"type": "message", **turn} for turn in turns],
            "max_output_tokens": limit,
            "seed": asked.seed,
            "text": text,
            "store": False,
            **generation(asked),
        }
        sample_id = new_sample_id()
        return Admitted(
            sample_id=sample_id,
            model=asked.model,
            target=target,
            session_id=None if session is None else session.id,
            route=RESPONSES,
            body=body,
            prompts=(length,),
            samples=1,
            scoring=False,
            include_usage=True,
            return_token_ids=False,
            metadata=asked.metadata,
            call=Call(
                sample_id=sample_id,
                principal=self.principal,
                session=session,
                target=target,
                tag=self.tag,
                prompt=length,
                sampled=limit,
                engine_prompt=length,
                engine_sampled=limit,
                rated=Limit.TOKENS in self.allowance.limits,
            ),
        )

    async def find_model(self, model: str) -> tuple[Target, Session | None]:
        """Return what answers for ``model`` (a base model, a live session by id or name, or ``group@n``), and for which
        session it counts.

        Raises:
            NotFound: ``model_not_found``.
            Conflict: the session stopped or has no published version; the version is not published.
        """
        asking = self.asking_session
        if model in self.catalog.models:
            return Target(base=self.catalog.models[model], version=None, asker=self.principal.project_id), asking
        ports = (self.database, self.engines, self.catalog, self.clock)
        try:
            if parse_address(model) is not None:
                return await find_target(*ports, self.principal.project_id, model, field="model"), asking
            async with self.database.read() as unit:
                session = await find_session(unit, self.principal.project_id, model)
            return await session_target(*ports, session, field="model"), session
        except NotFound:
            raise NotFound("no such model, or not yours", code="model_not_found", field="model") from None

    async def _length(self, target: Target, body: Mapping[str, Any], limit: int | None) -> int:
        """Return how many tokens a prompt has, or more where it has room beside ``limit`` all the same: to count them
        is a call to the engine."""
        if limit is not None:
            most = await self.engines.most_tokens(target, body)
            if most + limit <= target.base.context_length:
                return most
        return len(await self.engines.tokenize(target, body))

    async def _prompt_lengths(self, target: Target, prompts: Sequence[Prompt], limit: int) -> list[int]:
        lengths: list[int] = []
        for index, prompt in enumerate(prompts):
            field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            if isinstance(prompt, str):
                alone = prompt and len(prompts) == 1  # the engine says its length, of several only the sum
                length = await self._length(target, {"prompt": prompt}, limit if alone else None)
            else:
                check_tokens(prompt, target.base, field=field)
                length = len(prompt)
            if length == 0:
                raise Invalid(f"{field} must hold at least one token", field=field)
            lengths.append(length)
        return lengths

    def _admitted(
        self,
        asked: SamplingCreate,
        target: Target,
        session: Session | None,
        route: str,
        body: Mapping[str, Any],
        lengths: Sequence[int],
        *,
        echo: bool,
    ) -> Admitted:
        samples = samples_of(asked)
        check_sampling(asked, target, len(lengths), samples)
        field = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        limit: int = body[field]
        self.allowance.check(Limit.PROMPTS, len(lengths), name="prompt")
        self.allowance.check(Limit.SAMPLES, samples, name="n" if samples == (asked.n or 1) else "best_of")
        self.allowance.check(Limit.TOKENS_OUT, limit, name=field)
        self.allowance.check(Limit.STOPS, len(asked.stop or ()) + len(asked.stop_token_ids or ()), name="stop")
        if (asked.min_tokens or 0) > limit:
            raise Invalid(f"min_tokens must be at most {field}, {limit}", field="min_tokens")
        sample_id, scoring = new_sample_id(), limit == 0
        return Admitted(
            sample_id=sample_id,
            model=asked.model,
            target=target,
            session_id=None if session is None else session.id,
            route=route,
            body={**body, **sampling(asked), "n": samples, "return_token_ids": not echo},
            prompts=tuple(lengths),
            samples=samples,
            scoring=scoring,
            include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
            return_token_ids=bool(asked.return_token_ids),
            metadata=asked.metadata,
            call=Call(
                sample_id=sample_id,
                principal=self.principal,
                session=session,
                target=target,
                tag=self.tag,
                prompt=sum(lengths),
                sampled=0 if scoring else samples * len(lengths) * limit,
                engine_prompt=samples * sum(lengths),
                engine_sampled=samples * len(lengths) * max(1, limit),
                scoring=scoring,
                rated=Limit.TOKENS in self.allowance.limits,
            ),
        )


async def _admission(request: Request, principal: InferenceCaller, tag: Tag) -> Admission:
    state = request.state  # one dependency for all: each costs FastAPI as much as the rest of this function
    return Admission(
        principal=principal,
        database=state.database,
        engines=state.engines,
        grammars=state.grammars,
        catalog=state.catalog,
        prices=state.prices,
        clock=state.clock,
        tag=tag,
        allowance=state.allowance,
        asking_session=asking_session(request),
    )


AdmissionDep = Annotated[Admission, Depends(_admission)]
