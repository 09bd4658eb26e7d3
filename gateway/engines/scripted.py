"""A deterministic engine process that speaks the part of vLLM's HTTP the gateway uses, without weights.

``python -m gateway.engines.scripted --port 8101 --served-name scripted``; the bearer key comes from the environment
variable ``LOOPLINE_SCRIPTED_KEY``. An adapter is a directory with a ``scripted.json`` (see ``gateway.core.scripted``):
a trainer that records ``scripted_scores(fingerprint, tokens)`` as its canary passes the publish gate here.
"""

import argparse
import asyncio
import hmac
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.core.scripted import BASE_FINGERPRINT, read_fingerprint
from gateway.engines.launch import EXACT_PROMPT_SCORES
from gateway.engines.scripted_answers import (
    Limits,
    Refused,
    as_tool_call,
    chat_prompt,
    choice_of,
    draw_of,
    prompts_of,
    usage,
)
from gateway.engines.scripted_model import Draw, Drawn, decode, draw, encode
from gateway.engines.scripted_responses import response_closing, response_delta, response_of, response_opening


@dataclass(kw_only=True)
class ScriptedEngine:
    """State of the process: adapters by name and counters."""

    served_name: str
    limits: Limits
    key: str
    token_delay_s: float
    fingerprints: dict[str, str] = field(default_factory=dict[str, str])
    running: Counter[str] = field(default_factory=Counter[str])
    most_adapters: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted: set[str] = field(default_factory=set[str])
    started_at: float = field(default_factory=time.time)

    def fingerprint(self, model: str) -> str:
        if model == self.served_name:
            return BASE_FINGERPRINT
        if model not in self.fingerprints:
            raise HTTPException(404, f"The model `{model}` does not exist. Known: {', '.join(self.fingerprints)}")
        return self.fingerprints[model]


class Running:
    """Counts a request as running while it is entered."""

    def __init__(self, engine: ScriptedEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def __enter__(self) -> None:
        self._engine.running[self._model] += 1
        adapters = sum(count > 0 for name, count in self._engine.running.items() if name in self._engine.fingerprints)
        self._engine.most_adapters = max(self._engine.most_adapters, adapters)

    def __exit__(self, *_: object) -> None:
        self._engine.running[self._model] -= 1


def create_scripted_app(engine: ScriptedEngine) -> Starlette:
    """Return the server of ``engine``."""

    async def health(_: Request) -> Response:
        return Response()

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": n} for n in (engine.served_name, *engine.fingerprints)]})

    async def load(request: Request) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if name == engine.served_name or name in engine.fingerprints:
            raise HTTPException(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            engine.fingerprints[name] = await asyncio.to_thread(read_fingerprint, Path(body["lora_path"]))
        except OSError:
            raise HTTPException(404, "No adapter found at the path") from None
        except (ValueError, KeyError, TypeError) as error:
            raise HTTPException(500, f"cannot load the adapter: {error!r}") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if engine.fingerprints.pop(name, None) is None:
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found.")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        tokens = chat_prompt(body["messages"]) if "messages" in body else encode(body["prompt"])
        return JSONResponse({"count": len(tokens), "max_model_len": engine.limits.max_model_len, "tokens": tokens})

    async def metrics(_: Request) -> Response:
        used = ",".join(name for name, count in engine.running.items() if count and name in engine.fingerprints)
        labels = f'{{max_lora="0",running_lora_adapters="{used}",waiting_lora_adapters=""}}'
        lines = {
            f"vllm:lora_requests_info{labels}": 1,
            "process_start_time_seconds": engine.started_at - 1.0,  # as early as a kernel may say; it answers at once
            "vllm:num_requests_running": engine.running.total(),
            "vllm:num_requests_waiting": 0,
            "vllm:prompt_tokens_total": engine.prompt_tokens,
            "vllm:generation_tokens_total": engine.generation_tokens,
            "scripted:most_adapters_at_once": engine.most_adapters,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in lines.items()))

    async def abort(request: Request) -> Response:
        engine.aborted.update((await request.json())["request_ids"])
        return Response()

    async def completions(request: Request) -> Response:
        body = await request.json()
        return await answer(engine, request, body, prompts_of(body["prompt"]), chat=False)

    async def chat(request: Request) -> Response:
        body = await request.json()
        body["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
        return await answer(engine, request, body, [chat_prompt(body["messages"])], chat=True)

    async def responses(request: Request) -> Response:
        return await respond(engine, await request.json())

    async def failed(request: Request, error: Exception) -> Response:
        status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, repr(error))
        return JSONResponse({"error": {"message": detail, "type": "Error", "param": None, "code": status}}, status)

    def guarded(path: str, endpoint: Any, method: str) -> Route:
        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if engine.key and not hmac.compare_digest(given.encode(), engine.key.encode()):
                raise HTTPException(401, "Unauthorized")
            return await endpoint(request)

        return Route(path, checked, methods=[method])

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            guarded("/tokenize", tokenize, "POST"),
            guarded("/v1/models", models, "GET"),
            guarded("/v1/load_lora_adapter", load, "POST"),
            guarded("/v1/unload_lora_adapter", unload, "POST"),
            guarded("/inference/v1/abort_requests", abort, "POST"),
            guarded("/v1/completions", completions, "POST"),
            guarded("/v1/chat/completions", chat, "POST"),
            guarded("/v1/responses", responses, "POST"),
        ],
        exception_handlers={HTTPException: failed, Exception: failed},
    )


async def answer(
    engine: ScriptedEngine, request: Request, body: Mapping[str, Any], prompts: list[list[int]], *, chat: bool
) -> Response:
    """Draw ``n`` sequences for each prompt and answer in the shape of the route."""
    fingerprint = engine.fingerprint(body["model"])
    try:
        draws = [
            draw_of(body, prompt, fingerprint=fingerprint, sample=sample, limits=engine.limits)
            for prompt in prompts
            for sample in range(body.get("n") or 1)
        ]
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    name = request.headers.get("x-request-id", "")
    if body.get("stream"):
        stream = events(engine, body, draws, prompts=prompts, name=name, chat=chat)
        return StreamingResponse(stream, media_type="text/event-stream")
    names = request_names(name, prompts)
    with Running(engine, body["model"]):
        choices: list[dict[str, Any]] = []
        sampled = 0
        for index, one in enumerate(draws):
            drawn: list[Drawn] = []
            for token in draw(one):
                if names & engine.aborted:
                    break
                await pause(engine, one, first=not drawn, request=request)
                drawn.append(token)
            choice = choice_of(index, one, drawn, body, chat=chat)
            if chat:
                as_tool_call(choice, body, index, first=True, last=True)
            choices.append({**choice, "finish_reason": choice["finish_reason"] or "abort"})
            sampled += len(drawn)
    engine.aborted -= names
    return JSONResponse(
        {
            "id": "scripted",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": body["model"],
            "choices": choices,
            "usage": usage(prompt_tokens, sampled),
            "system_fingerprint": EXACT_PROMPT_SCORES,
        }
    )


async def respond(engine: ScriptedEngine, body: Mapping[str, Any]) -> Response:
    """Answer ``/v1/responses``, in one piece or as events. A request without a name gets one, as in vLLM."""
    body = {"request_id": f"resp_{secrets.token_hex(8)}", **body}
    fingerprint, name = engine.fingerprint(body["model"]), f"{body['request_id']}_0"
    asked = {**body, "max_tokens": body["max_output_tokens"]}
    try:
        one = draw_of(asked, chat_prompt(body["input"]), fingerprint=fingerprint, sample=0, limits=engine.limits)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    drawn: list[Drawn] = []

    async def tokens() -> AsyncIterator[Drawn]:
        with Running(engine, body["model"]):
            for token in draw(one):
                if name in engine.aborted:
                    break
                await pause(engine, one, first=not drawn)
                drawn.append(token)
                yield token
        engine.aborted.discard(name)

    async def stream() -> AsyncIterator[str]:
        text = ""
        for event in response_opening(one, body):
            yield server_sent(event)
        async for token in tokens():
            text += (piece := decode([token.token]))
            yield server_sent(response_delta(body, piece))
        for event in response_closing(one, body, drawn, text):
            yield server_sent(event)

    if body.get("stream"):
        return StreamingResponse(stream(), media_type="text/event-stream")
    async for _ in tokens():
        pass
    return JSONResponse(response_of(one, body, drawn))


def server_sent(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def request_names(name: str, prompts: Sequence[object]) -> set[str]:
    """Return what the requests of one body are called, as in vLLM."""
    return {f"chatcmpl-{name}", *(f"cmpl-{name}-{index}" for index in range(len(prompts)))}


async def pause(engine: ScriptedEngine, one: Draw, *, first: bool, request: Request | None = None) -> None:
    """Count a token, and with a sequence's first one its prompt, as vLLM does; spend its time, if the client stays."""
    engine.generation_tokens += 1
    engine.prompt_tokens += len(one.prompt) if first else 0
    if engine.token_delay_s:
        await asyncio.sleep(engine.token_delay_s)
        if request is not None and await request.is_disconnected():
            raise HTTPException(499, "Client disconnected")


async def events(
    engine: ScriptedEngine,
    body: Mapping[str, Any],
    draws: Sequence[Draw],
    *,
    prompts: Sequence[Sequence[int]],
    name: str,
    chat: bool,
) -> AsyncIterator[str]:
    """Server-sent events, one token each, then the usage, then the end mark. An abort ends every sequence at once."""
    sampled = 0
    options: Mapping[str, Any] = body.get("stream_options") or {}
    kind = "chat.completion.chunk" if chat else "text_completion"
    shape = {"id": "scripted", "created": 0, "model": body["model"], "object": kind}
    names = request_names(name, prompts)

    def chunk(index: int, one: Draw, drawn: Sequence[Drawn], so_far: int) -> str:
        shown = {**body, "prompt_logprobs": None, "echo": body.get("echo") and so_far == 1}
        choice = choice_of(index, one, drawn, shown, chat=chat)
        if chat:
            as_tool_call(choice, body, index, first=so_far == 1, last=choice["finish_reason"] is not None)
            choice["delta"] = choice.pop("message")
        document = {**shape, "choices": [choice]}
        if options.get("continuous_usage_stats"):
            document["usage"] = usage(len(one.prompt), so_far)
        return f"data: {json.dumps(document)}\n\n"

    with Running(engine, body["model"]):
        for index, one in enumerate(draws):
            if names & engine.aborted:
                break
            for so_far, token in enumerate(draw(one), start=1):
                await pause(engine, one, first=so_far == 1)
                sampled += 1
                yield chunk(index, one, [token], so_far)
                if names & engine.aborted:
                    break
    engine.aborted -= names
    if options.get("include_usage"):
        total = usage(sum(map(len, prompts)), sampled)
        yield f"data: {json.dumps({**shape, 'choices': [], 'usage': total})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.engines.scripted", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--served-name", default="scripted", help="name of the base model")
    parser.add_argument("--max-model-len", type=int, default=2048, help="prompt plus generated tokens")
    parser.add_argument("--vocab-size", type=int, default=49152, help="number of token ids")
    parser.add_argument("--token-delay-ms", type=float, default=0.0, help="time a token takes, in milliseconds")
    options = parser.parse_args()
    engine = ScriptedEngine(
        served_name=options.served_name,
        limits=Limits(max_model_len=options.max_model_len, vocab_size=options.vocab_size),
        key=os.environ.get("LOOPLINE_SCRIPTED_KEY", ""),
        token_delay_s=options.token_delay_ms / 1000,
    )
    uvicorn.run(create_scripted_app(engine), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
