"""A gateway small enough to read: strict numbering, idempotency keys and a real one-layer model, as an ASGI app.

And a network that loses what a test tells it to lose.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import httpx
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

VOCAB = 16
KEY = "tml-test"
NOW = "2026-01-01T00:00:00Z"

Loss = Literal["request", "reply", "503", "429", "502"]


class SmallGateway:
    """``refuse`` may turn a (kind, body) away with a status, code and message; ``fail`` may fail an accepted one."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict[int, dict[str, Any]]] = {"sess-1": {}}  # what was accepted, by seq
        self.arrivals: list[tuple[str, int]] = []  # every training POST that arrived: (kind, seq)
        self.samples: list[tuple[str, dict[str, Any]]] = []  # (idempotency key, body) of each sampling that was done
        self.scores: list[dict[str, Any]] = []
        self.stopped = 0
        self.refuse: Callable[[str, dict[str, Any]], tuple[int, str, str] | None] = lambda kind, body: None
        self.fail: Callable[[str, dict[str, Any]], dict[str, Any] | None] = lambda kind, body: None
        self.metrics: Callable[[dict[str, Any]], dict[str, float]] = lambda body: {}
        self.open = threading.Event()  # operations finish only while it is set
        self.open.set()
        self.weights = torch.linspace(-1, 1, VOCAB * VOCAB, dtype=torch.float64).sin().reshape(VOCAB, VOCAB)
        self.weights.requires_grad_()
        self.session_bodies: list[dict[str, Any]] = []
        self.sampling_now = 0
        self.most_sampling = 0
        self._keys: dict[str, dict[str, Any]] = {}
        m = "/training/v1"
        self.app = Starlette(
            routes=[
                Route(f"{m}/sessions", self._create, methods=["POST"]),
                Route(f"{m}/sessions", self._list, methods=["GET"]),
                Route(f"{m}/sessions/{{id}}", self._stop, methods=["DELETE"]),
                Route(f"{m}/sessions/{{id}}/operations", self._operations),
                Route(f"{m}/sessions/{{id}}/sample", self._sample, methods=["POST"]),
                Route(f"{m}/sessions/{{id}}/logprobs", self._logprobs, methods=["POST"]),
                Route(f"{m}/logprobs", self._logprobs, methods=["POST"]),
                Route(f"{m}/sample", self._sample, methods=["POST"]),
                Route(f"{m}/sessions/{{id}}/{{kind}}", self._submit, methods=["POST"]),
                Route(f"{m}/operations/{{id}}", self._operation),
                Route(f"{m}/base_models", self._base_models),
                Route(f"{m}/base_models/{{name}}/tokenizer/{{file}}", self._tokenizer),
                Route(f"{m}/model_packages", self._groups),
                Route(f"{m}/model_packages/{{group}}", self._versions),
                Route(f"{m}/model_packages/{{group}}/{{n}}", self._version),
                Route(f"{m}/usage", self._usage),
            ]
        )

    @property
    def recorded(self) -> dict[int, dict[str, Any]]:
        """What the first session accepted, by seq."""
        return self.sessions["sess-1"]

    def kinds(self) -> list[str]:
        """What was recorded, in order of seq."""
        return [self.recorded[seq]["kind"] for seq in sorted(self.recorded)]

    async def _create(self, request: Request) -> Response:
        if request.headers["Authorization"] != f"Bearer {KEY}":
            return _error(401, "invalid_api_key", "no such key")
        body = await request.json()
        self.session_bodies.append(body)
        name = f"sess-{len(self.session_bodies)}"
        self.sessions.setdefault(name, {})
        return JSONResponse(_session(body) | {"id": name}, 201)

    async def _list(self, request: Request) -> Response:
        sessions = [_session({"base_model": "tiny", "name": f"run-{n}"}) | {"id": f"sess-{n}"} for n in range(3)]
        at = 0 if "after" not in request.query_params else int(request.query_params["after"][-1]) + 1
        page = sessions[at : at + 2]
        return JSONResponse({"data": page, "next": page[-1]["id"] if at + 2 < len(sessions) else None})

    async def _stop(self, request: Request) -> Response:
        self.stopped += 1
        return JSONResponse(_session({"base_model": "tiny"}) | {"status": "stopped"})

    async def _submit(self, request: Request) -> Response:
        kind, raw, key = request.path_params["kind"], await request.body(), request.headers["Idempotency-Key"]
        session = request.path_params["id"]
        recorded = self.sessions[session]
        body = json.loads(raw)
        seq = body["seq"]
        self.arrivals.append((kind, seq))
        if seq in recorded:
            if recorded[seq]["raw"] != raw or recorded[seq]["key"] != key:
                return _error(409, "sequence_reused", f"{seq} was used")
            return JSONResponse(recorded[seq]["read"], 202)
        if (refusal := self.refuse(kind, body)) is not None:
            return _error(*refusal)
        if seq != len(recorded) + 1:
            return _error(409, "out_of_order", f"{seq} came after {len(recorded)}")
        name = f"op-{seq}" if session == "sess-1" else f"op-{session}-{seq}"
        read = {"id": name, "session_id": session, "seq": seq, "kind": kind, "status": "queued"}
        recorded[seq] = {"kind": kind, "body": body, "raw": raw, "key": key, "read": read, "done": None}
        return JSONResponse(read, 202)

    async def _operations(self, request: Request) -> Response:
        after = int(request.query_params["after_seq"])
        recorded = self.sessions[request.path_params["id"]]
        found = [recorded[seq]["read"] for seq in sorted(recorded) if seq > after]
        return JSONResponse({"data": found, "next": None})

    async def _operation(self, request: Request) -> Response:
        await asyncio.to_thread(self.open.wait)
        session, _, seq = request.path_params["id"].removeprefix("op-").rpartition("-")
        recorded = self.sessions[session or "sess-1"]
        for earlier in range(1, int(seq) + 1):
            record = recorded[earlier]
            if record["done"] is None:
                record["done"] = self._carry_out(record)
        return JSONResponse(recorded[int(seq)]["done"])

    def _carry_out(self, record: dict[str, Any]) -> dict[str, Any]:
        kind, body, read = record["kind"], record["body"], record["read"]
        if (error := self.fail(kind, body)) is not None:
            return read | {"status": "failed", "error": error}
        match kind:
            case "forward" | "forward_backward":
                outputs, total = [], torch.zeros((), dtype=torch.float64)
                for datum in body["data"]:
                    inputs = datum["loss_fn_inputs"]
                    targets = torch.tensor(inputs["target_tokens"]["data"])
                    logprobs = self.logprobs(datum["model_input"], targets)
                    total = total - (logprobs * torch.tensor(inputs["weights"]["data"], dtype=torch.float64)).sum()
                    data = logprobs.detach().tolist()
                    outputs.append({"logprobs": {"dtype": "float32", "shape": [len(data)], "data": data}})
                if kind == "forward_backward":
                    total.backward()
                metrics = {"loss:sum": float(total.detach()), **self.metrics(body)}
                result = {"type": "forward", "loss_fn_outputs": outputs, "metrics": metrics}
            case "optim_step":
                result = {"type": "optim_step", "optimizer_step": 1, "metrics": {"grad_norm:mean": 0.5}}
            case "load_state":
                result = {"type": "load_state", "version_id": "ver-9", "optimizer_step": 9, "discarded_gradient": False}
            case _:
                number = record["read"]["seq"]
                result = {"type": "save", "version": f"demo@{number}", "version_id": f"ver-{number}"}
                result |= {"group": "demo", "number": number}
        usage = {"train": 3} if kind.startswith("forward") else {}
        return read | {"status": "completed", "result": result, "usage": usage, "cost_nanos": 7}

    def logprobs(self, tokens: list[int], targets: torch.Tensor) -> torch.Tensor:
        """The model: log p of each target after each token, float64 ``[N]``."""
        return torch.log_softmax(self.weights[torch.tensor(tokens)], -1)[torch.arange(len(tokens)), targets]

    async def _sample(self, request: Request) -> Response:
        self.sampling_now += 1
        self.most_sampling = max(self.most_sampling, self.sampling_now)
        await asyncio.sleep(0)
        body, key = await request.json(), request.headers["Idempotency-Key"]
        if key not in self._keys:
            self.samples.append((key, body))
            sequence = {"tokens": [1, 2], "logprobs": [-0.5, -1.0], "stop_reason": "length"}
            prompt = [None, *[-1.0] * (len(body["prompt"]) - 1)]
            self._keys[key] = _answer(body) | {
                "id": f"smp-{len(self.samples)}",
                "sequences": [sequence] * body["num_samples"],
                "prompt_logprobs": prompt if body["prompt_logprobs"] else None,
                "topk_prompt_logprobs": [None, [[3, -0.1]]] if body["topk_prompt_logprobs"] else None,
            }
        self.sampling_now -= 1
        return JSONResponse(self._keys[key])

    async def _logprobs(self, request: Request) -> Response:
        body = await request.json()
        self.scores.append(body)
        logprobs: list[float | None] | None = [None, *[-2.0] * (len(body["prompt"]) - 1)]
        alternatives = None
        if "targets" in body:
            logprobs = [-float(target) for target in body["targets"]]
        elif "alternatives" in body:
            logprobs, alternatives = None, [[-float(target) for target in row] for row in body["alternatives"]]
        return JSONResponse(_answer(body) | {"logprobs": logprobs, "alternative_logprobs": alternatives})

    async def _base_models(self, request: Request) -> Response:
        model = {"context_length": 64, "vocab_size": VOCAB, "max_lora_rank": 8, "dtype": "float32"}
        files = ["tokenizer.json", "tokenizer_config.json"]
        names = ["tiny", "Big"]
        return JSONResponse({"data": [{"name": name, **model, "tokenizer_files": files} for name in names]})

    async def _tokenizer(self, request: Request) -> Response:
        if request.path_params["file"] == "tokenizer_config.json":
            return PlainTextResponse(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
        tokenizer.pre_tokenizer = Whitespace()
        return PlainTextResponse(tokenizer.to_str())

    async def _groups(self, request: Request) -> Response:
        return JSONResponse({"data": [{"name": "demo"}]})

    async def _versions(self, request: Request) -> Response:
        kinds = ["adapter", "state", "adapter"]
        return JSONResponse({"data": [_version(n + 1, kind) for n, kind in enumerate(kinds)], "next": None})

    async def _version(self, request: Request) -> Response:
        return JSONResponse(_version(int(request.path_params["n"]), "state"))

    async def _usage(self, request: Request) -> Response:
        line = {"key_id": "k", "session_id": request.query_params.get("session_id"), "base_model": "tiny"}
        line |= {"meter": "train", "quantity": 5, "cost_nanos": 11}
        return JSONResponse({"total_cost_nanos": 11, "data": [line]})


class Network(httpx.AsyncBaseTransport):
    """The way to a gateway. ``trouble`` tells, request by request, what gets lost: the request, or only its reply."""

    def __init__(self, gateway: SmallGateway) -> None:
        self._inner = httpx.ASGITransport(gateway.app)
        self.trouble: deque[Loss | None] = deque()
        self.down = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        loss = self.trouble.popleft() if self.trouble else None
        if self.down or loss == "request":
            raise httpx.ConnectError("nobody there", request=request)
        if loss in ("502", "503", "429"):
            return httpx.Response(int(loss), headers={"Retry-After": "3"}, request=request)
        response = await self._inner.handle_async_request(request)
        if loss == "reply":
            await response.aread()
            raise httpx.ReadError("the line went dead", request=request)
        return response


def _error(status: int, code: str, message: str) -> Response:
    kinds = {400: "invalid", 401: "unauthenticated", 404: "not_found", 409: "conflict", 500: "internal"}
    field = "data[1].model_input" if "data[1]" in message else None
    error = {"code": code, "message": message, "kind": kinds[status], "field": field, "request_id": "req-1"}
    return JSONResponse({"error": error | {"details": {"datum": 1} if field else {}}}, status)


def _session(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "sess-1",
        "name": body.get("name"),
        "base_model": body["base_model"],
        "lora": body.get("lora", {}),
        "model_package_group": body.get("model_package_group", "demo"),
        "status": "running",
        "activity": "idle",
        "created_at": NOW,
        "last_used_at": NOW,
        "applied_seq": 0,
        "optimizer_step": 0,
        "order": "strict",
    }


def _version(number: int, kind: str) -> dict[str, Any]:
    return {
        "id": f"ver-{number}",
        "address": f"demo@{number}",
        "group": "demo",
        "number": number,
        "kind": kind,
        "state": "published",
        "base_model": "tiny",
        "lora": {"rank": 4, "alpha": 8.0, "train_attn": True, "train_mlp": False, "train_unembed": False, "seed": 5},
        "optimizer_step": 9,
        "created_at": f"2026-01-0{number}T00:00:00Z",
    }


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    version = body.get("version")
    return {"id": "smp", "base_model": "tiny", "version": version, "fingerprint": "f", "usage": {"sample": 2}}
