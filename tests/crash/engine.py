"""The scripted engine as the crash tests run it: it takes real adapters, and keeps a journal of what it computed.

The real trainer's adapters have no ``scripted.json``: their fingerprint is their manifest's hash, and for the tokens
of their canary it answers the log-probabilities recorded there (the gate has tests of its own, against vLLM). Each
answer is one line in the journal, written before it leaves, so that tokens can be counted across kills.
"""

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.engines.scripted import ScriptedEngine, answer, create_scripted_app
from gateway.engines.scripted_answers import Limits, prompts_of, usage

Scores = dict[tuple[int, ...], Sequence[float]]


class Recorded:
    """The canaries of the adapters that were loaded, by model name; the base's scores are the control."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._scores: dict[str, Scores] = {}

    async def load(self, request: Request) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if name in self._engine.fingerprints:
            return JSONResponse({"error": {"message": f"'{name}' has already been loaded", "code": 400}}, 400)
        try:
            manifest = (Path(body["lora_path"]) / "manifest.json").read_bytes()
        except OSError:
            return JSONResponse({"error": {"message": "No adapter found at the path", "code": 404}}, 404)
        canary = json.loads(manifest)["canary"]
        self._engine.fingerprints[name] = hashlib.sha256(manifest).hexdigest()
        for model, scores in ((name, canary["logprobs"]), (self._engine.served_name, canary["base_logprobs"])):
            known = self._scores.setdefault(model, {})
            known.update(zip(map(tuple, canary["tokens"]), scores, strict=True))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request to score recorded canaries; None for any other request."""
        scores = self._scores.get(body["model"], {})
        prompts = [tuple(prompt) for prompt in prompts_of(body["prompt"])]
        if body.get("prompt_logprobs") is None or not all(prompt in scores for prompt in prompts):
            return None
        self._engine.prompt_tokens += sum(map(len, prompts))
        self._engine.generation_tokens += len(prompts)
        choices = [_scored(index, prompt, scores[prompt]) for index, prompt in enumerate(prompts)]
        return {
            "object": "text_completion",
            "model": body["model"],
            "choices": choices,
            "usage": usage(sum(len(prompt) for prompt in prompts), len(prompts)),
        }


def _scored(index: int, prompt: Sequence[int], scores: Sequence[float]) -> dict[str, Any]:
    entries: list[Any] = [
        {str(token): {"logprob": score, "rank": 1}} for token, score in zip(prompt[1:], scores, strict=True)
    ]
    return {
        "index": index,
        "text": "",
        "finish_reason": "length",
        "token_ids": [1],
        "prompt_token_ids": list(prompt),
        "prompt_logprobs": [None, *entries],
        "logprobs": {"tokens": ["token_id:1"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:1": -1.0}]},
    }


def create_app(engine: ScriptedEngine, journal: Path) -> Starlette:
    """Return the scripted engine's server with recorded canaries and the journal in front."""
    recorded = Recorded(engine)
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def completions(request: Request) -> Response:
        body = await request.json()
        known = recorded.answer(body)
        if known is not None:
            return JSONResponse(known)
        response = await answer(engine, request, body, prompts_of(body["prompt"]), chat=False)
        counted = json.loads(bytes(response.body))["usage"]
        line = {"prompt": counted["prompt_tokens"], "sampled": counted["completion_tokens"], "seed": body.get("seed")}
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        return response

    scripted = create_scripted_app(engine)
    own = [
        Route("/v1/load_lora_adapter", recorded.load, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return Starlette(
        routes=[*own, *(route for route in scripted.routes if getattr(route, "path", "") not in {r.path for r in own})],
        exception_handlers=dict(scripted.exception_handlers),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args(arguments)
    engine = ScriptedEngine(
        served_name=options.served_name,
        limits=Limits(max_model_len=2048, vocab_size=options.vocab_size),
        key="",
        token_delay_s=0.0005,
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    uvicorn.run(create_app(engine, options.journal), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
