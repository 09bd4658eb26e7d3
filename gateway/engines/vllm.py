"""One vLLM server over HTTP: tokens in, tokens and log-probabilities out; adapters in and out.

Every request names all sampling fields, so that no default of a model or a server version decides. A lost connection
is EngineLost, an unknown name UnknownAdapter; both are Unavailable and carry nothing of the engine's text.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import orjson

from gateway.core.counts import RESPONSE_ENDS, response_counts
from gateway.core.errors import Internal, Invalid, Unavailable
from gateway.core.sampling import EngineAnswer, Generation, SampleRequest, Stopped, TokenCounts
from gateway.core.tracing import Tracer, Unrecorded
from gateway.engines.answers import (
    EngineLost,
    UnknownAdapter,
    check_finished,
    error_of,
    generation_of,
    next_token_scores,
    probe_counts,
    prompt_scores,
    stopped_counts,
)
from gateway.engines.documents import document_of
from gateway.engines.http import EngineHttp
from gateway.engines.launch import EXACT_PROMPT_SCORES

HEALTH_TIMEOUT_S = 2.0
DRAIN_S = 10.0  # from an abort to the engine's last word; one that takes longer is hung up on

Count = Callable[[TokenCounts], None]

RESPONSES = "responses"  # a route that counts, names and ends its answers in its own way

_ABORT_AGAIN_S = 0.2
_LOADS = 3  # of an adapter that the engine does not take
_POSITIONS_AT_ONCE = 64  # positions of a sequence scored in one request; vLLM takes 128 logprob_token_ids

_NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
    "min_tokens": 0,
}


class Vllm:
    """A client of one server. Use as an async context manager."""

    def __init__(self, url: str, *, key: str, timeout_s: float, tracer: Tracer | None = None) -> None:
        self.url = url
        self.exact_prompt_scores = False  # what the last answer said: prompt scores include a LoRA on lm_head
        self._http = EngineHttp(url, key=key, timeout_s=timeout_s, tracer=tracer or Unrecorded())

    async def __aenter__(self) -> Self:
        self._http.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def healthy(self) -> bool:
        """Return whether the server answers and its engine lives."""
        try:
            status, _ = await self._http.get("/health", timeout_s=HEALTH_TIMEOUT_S)
        except Unavailable:
            return False
        return status == 200

    async def models(self) -> Sequence[str]:
        """Return all names the server answers to: the base model's first, then loaded adapters."""
        return [card["id"] for card in (await self._get("/v1/models"))["data"]]

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter at ``path``, absolute (a server takes another for a hub name).

        Loading a name that is there already is fine: names are never reused for other weights. The engine's refusal of
        one that is there looks like any other, and another gateway may unload it before we look: so it is asked again.

        Raises:
            EngineFault: the engine refused the adapter, or failed.
        """
        if not path.is_absolute():
            raise ValueError(f"adapter path must be absolute: {path}")
        for left in reversed(range(_LOADS)):
            try:
                await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            except Invalid:
                if name in await self.models():
                    return
                if not left:
                    raise
            else:
                return

    async def unload_adapter(self, name: str) -> None:
        """Make the server forget ``name``; one it does not know is fine."""
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        except UnknownAdapter:
            return

    async def generate(
        self, model: str, request: SampleRequest, *, context_length: int, stop: asyncio.Event | None = None
    ) -> Generation:
        """Sample from ``model``.

        Raises:
            Unavailable, Invalid, Internal: see ``answers``.
            Stopped: ``stop`` was set.
        """
        params = request.params
        body = {
            **_NEUTRAL,
            "model": model,
            "prompt": list(request.prompt),
            "n": request.num_samples,
            "max_tokens": context_length - len(request.prompt) if params.max_tokens is None else params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "skip_special_tokens": False,  # so that a stop string may be a special token
            "logprobs": request.topk_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            body["prompt_logprobs"] = request.topk_prompt_logprobs
        return generation_of(request, await self._answered("completions", body, stop), engine=self.url)

    async def score(
        self, model: str, sequences: Sequence[Sequence[int]], count: Count
    ) -> Sequence[Sequence[float | None]]:
        """Return the log-probabilities of ``sequence[1:]`` at temperature 1 for each sequence.

        ``count`` hears what the engine counted for it.
        """
        body = {**_NEUTRAL, "model": model, "prompt": [list(tokens) for tokens in sequences]}
        document = await self._post("/v1/completions", {**body, "max_tokens": 1, "prompt_logprobs": 0})
        count(probe_counts(document, engine=self.url))
        check_finished(document)
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        return [
            prompt_scores(tokens, choice["prompt_logprobs"])[1:]
            for tokens, choice in zip(sequences, choices, strict=True)
        ]

    async def score_by_generating(self, model: str, tokens: Sequence[int], count: Count) -> Sequence[float | None]:
        """Return what ``score`` returns for one sequence, each token scored as if it were about to be sampled: exact
        also where an engine leaves a LoRA on lm_head out of its prompt scores."""
        scores: list[float | None] = []
        for start in range(1, len(tokens), _POSITIONS_AT_ONCE):
            targets = tokens[start : start + _POSITIONS_AT_ONCE]
            body = {
                **_NEUTRAL,
                "model": model,
                "prompt": [list(tokens[:position]) for position in range(start, start + len(targets))],
                "max_tokens": 1,
                "logprobs": 1,
                "logprob_token_ids": sorted(set(targets)),
                "return_tokens_as_token_ids": True,
            }
            document = await self._post("/v1/completions", body)
            count(probe_counts(document, engine=self.url))
            scores += next_token_scores(targets, document)
        return scores

    async def complete(
        self, model: str, route: str, body: Mapping[str, Any], stop: asyncio.Event | None = None
    ) -> EngineAnswer:
        """POST an OpenAI body to ``/v1/{route}``; sampling fields it leaves out are sent as neutral ones.

        Raises:
            Stopped: ``stop`` was set.
        """
        document = await self._answered(route, {**_explicit(body), "model": model, "stream": False}, stop)
        check_finished(document)
        return EngineAnswer(engine=self.url, document=document)

    async def _answered(self, route: str, body: Mapping[str, Any], stop: asyncio.Event | None) -> dict[str, Any]:
        """Return the answer in one piece. Once ``stop`` is set, the engine is told to abort, and says how far it came.

        Raises:
            Stopped: with what the engine had done.
            Unavailable: also when it does not answer within DRAIN_S after the abort.
        """
        if stop is None:
            return await self._post(f"/v1/{route}", body)
        if stop.is_set():
            raise Stopped(None)
        name = secrets.token_hex(12)
        body = _named(route, name, body)
        try:
            async with asyncio.timeout(None) as patience:
                aborting = asyncio.create_task(self._abort(_request_ids(route, name, body), stop, patience))
                try:
                    document = await self._post(f"/v1/{route}", body, {"X-Request-Id": name})
                finally:
                    aborting.cancel()
        except TimeoutError:
            raise Unavailable("the engine did not answer in time", code="engine_timeout") from None
        if stop.is_set():
            if route == RESPONSES:
                raise Stopped(response_counts(document, engine=self.url))
            raise Stopped(stopped_counts(document, engine=self.url, samples=body["n"]))
        return document

    async def stream(
        self, model: str, route: str, body: Mapping[str, Any], stop: asyncio.Event
    ) -> AsyncGenerator[EngineAnswer]:
        """As ``complete``, streamed. Every chunk carries its sequence's ``usage`` so far, and a last one without
        choices the total.

        Once ``stop`` is set, the engine is told to abort, and the stream goes on to that last chunk: then nothing that
        the engine has counted was lost on the way. Closing the generator closes the connection, which aborts as well,
        but loses the count.

        Raises:
            Unavailable: also when the stream ends before its end mark.
        """
        name = secrets.token_hex(12)
        asked = {**_explicit(body), "model": model, "stream": True}
        if route == RESPONSES:
            asked = _named(route, name, asked)
        else:
            asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        aborting = asyncio.create_task(self._abort(_request_ids(route, name, body), stop))
        try:
            ended = False
            lines = self._http.lines(f"/v1/{route}", orjson.dumps(asked), {"X-Request-Id": name})
            async with aclosing(lines):
                async for line in lines:
                    if ended or not line.startswith(b"data:"):
                        continue  # to the end of the answer: then its connection can be used again
                    if (data := line.removeprefix(b"data:").strip()) == b"[DONE]":
                        ended = True
                        continue
                    chunk = document_of(data)
                    check_finished(chunk, aborted=stop.is_set())
                    _check_model(chunk, model)
                    ended = chunk.get("type") in RESPONSE_ENDS
                    yield EngineAnswer(engine=self.url, document=chunk)
        finally:
            aborting.cancel()
        if not ended:
            raise EngineLost("the engine's stream ended before its end")

    async def _abort(
        self, request_ids: Sequence[str], stop: asyncio.Event, patience: asyncio.Timeout | None = None
    ) -> None:
        """Abort requests once ``stop`` is set; again and again, since the engine may not know them yet. From then on
        ``patience`` ends after DRAIN_S."""
        await stop.wait()
        if patience is not None:
            patience.reschedule(asyncio.get_running_loop().time() + DRAIN_S)
        while True:
            with suppress(Unavailable, Invalid):
                await self._post("/inference/v1/abort_requests", {"request_ids": list(request_ids)})
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def tokenize(self, model: str, body: Mapping[str, Any]) -> Sequence[int]:
        """POST a body to ``/tokenize`` and return the ids."""
        return (await self._post("/tokenize", {**body, "model": model}))["tokens"]

    async def adapters_in_work(self) -> frozenset[str]:
        """Return the names of adapters that a running or waiting request may still need."""
        text = await self.metrics()
        if all(float(count) == 0 for count in _REQUESTS.findall(text)):
            return frozenset()
        seen = [(float(moment), labels) for labels, moment in _ADAPTERS.findall(text)]
        newest = max(seen, default=(0.0, ""))[1]  # one line per set of adapters there ever was, its value when
        return frozenset(name for names in _NAMES.findall(newest) for name in names.split(",") if name)

    async def metrics(self) -> str:
        """Return the Prometheus text."""
        _, content = await self._http.get("/metrics", timeout_s=HEALTH_TIMEOUT_S)
        return content.decode()

    async def _get(self, path: str) -> dict[str, Any]:
        return self._checked(*await self._http.get(path), None)

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        return self._checked(*await self._http.post(path, orjson.dumps(body), headers), body.get("model"))

    def _checked(self, status: int, content: bytes, model: str | None) -> dict[str, Any]:
        document = document_of(content)
        if status >= 400:
            raise error_of(status, document)
        _check_model(document, model)
        if "system_fingerprint" in document:
            self.exact_prompt_scores = document["system_fingerprint"] == EXACT_PROMPT_SCORES
        return document


def _response_id(name: str) -> str:
    return f"resp_{name}"


def _named(route: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Responses are named in the body, the others by a header."""
    return {**body, "request_id": _response_id(name)} if route == RESPONSES else dict(body)


def _request_ids(route: str, name: str, body: Mapping[str, Any]) -> Sequence[str]:
    """Return what vLLM calls the requests of one body that was sent under the request id ``name``."""
    if route == RESPONSES:
        return [f"{_response_id(name)}_0"]
    if route != "completions":
        return [f"chatcmpl-{name}"]
    prompt: Any = body.get("prompt")
    several = isinstance(prompt, list) and bool(cast("list[Any]", prompt)) and not isinstance(prompt[0], int)
    return [f"cmpl-{name}-{index}" for index in range(len(cast("list[Any]", prompt)) if several else 1)]


_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ADAPTERS = re.compile(r"^vllm:lora_requests_info\{([^}]*)\} (\S+)$", re.MULTILINE)
_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


def _explicit(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    return given if "input" in given else {**_NEUTRAL, **given}


def _check_model(document: Mapping[str, Any], asked: str | None) -> None:
    """An answer names the model that computed it; another one than asked must never pass for it."""
    answered = document.get("model")
    if asked is not None and answered is not None and answered != asked:
        raise Internal("the engine answered with another model than was asked", code="engine_answer_mismatch")
