"""Sampling and scoring under one exact version, the session's latest one, or the base model."""

from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from loopline._batch import to_tokens
from loopline._connection import Connection
from loopline._transport import encode
from loopline.errors import ClientStopped, ResultMismatchError
from loopline.futures import APIFuture
from loopline.results import SampleResponse
from loopline.types import SamplingParams, TensorData, to_params

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class _Scores(BaseModel):
    id: str
    logprobs: list[float | None] | None
    alternative_logprobs: list[list[float]] | None = None


class SamplingClient:
    """A handle on what answers. Calls run concurrently and in no order; each runs once, however often it is retried.

    Made by ``ServiceClient.create_sampling_client`` or ``TrainingClient.create_sampling_client``, not directly.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        session_id: str | None = None,
        version: str | None = None,
        base_model: str | None = None,
    ) -> None:
        self._connection = connection
        self._session_id = session_id
        self._base_model = base_model
        self.version = version
        self._path = "" if session_id is None else f"/sessions/{session_id}"
        self._name = version or session_id or base_model
        self._target: dict[str, str] = {}
        if version is not None:
            self._target["version"] = version
        elif session_id is None and base_model is not None:
            self._target["base_model"] = base_model
        self._stopped = False

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw ``num_samples`` continuations of ``prompt``; returns at once.

        ``prompt`` is token ids (list, array, ModelInput, chunk, ``{"chunks": [...]}``) or a string, which needs the
        ``tokenizer`` extra. ``topk_prompt_logprobs`` asks for that many alternatives at each prompt position.
        """
        params = to_params(SamplingParams, sampling_params)
        body = {
            "prompt": self._tokens(prompt),
            "num_samples": num_samples,
            **params.to_wire(),
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs or 0,
            **self._target,
        }
        return self._start("sample", self._sample(encode(body)))

    async def sample_async(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int | None = None,
    ) -> SampleResponse:
        """As ``sample``, and awaits the result."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )

    def compute_logprobs(self, prompt: Any, *, temperature: float = 1.0) -> APIFuture[list[float | None]]:
        """Score given tokens: log p of each prompt token, None at position 0; returns at once.

        ``temperature`` divides the logits.
        """
        tokens = self._tokens(prompt)
        body = encode({"prompt": tokens, "temperature": temperature, **self._target})
        return self._start("compute_logprobs", self._score(body, len(tokens)))

    async def compute_logprobs_async(self, prompt: Any, *, temperature: float = 1.0) -> list[float | None]:
        """As ``compute_logprobs``, and awaits the result."""
        return await self.compute_logprobs(prompt, temperature=temperature)

    def compute_target_logprobs(self, prompt: Any, targets: Any, *, temperature: float = 1.0) -> APIFuture[TensorData]:
        """Score tokens that need not be the prompt's own: log p of ``targets[t]`` after ``prompt[: t + 1]``.

        ``targets`` is a list, array or tensor of ids ``[N]``, or ``[N, K]`` for up to 64 alternatives at each of the
        prompt's N positions; the result is float32 in its shape. Returns at once.

        Raises:
            ValueError: ``targets`` has another shape.
        """
        tokens, wanted = self._tokens(prompt), TensorData(targets, "int64")
        if len(wanted.shape) not in (1, 2) or wanted.shape[0] != len(tokens):
            raise ValueError(
                f"targets must have shape [{len(tokens)}] or [{len(tokens)}, K] like the prompt, got {wanted.shape}"
            )
        asked = "targets" if len(wanted.shape) == 1 else "alternatives"
        body = encode({"prompt": tokens, asked: wanted.tolist(), "temperature": temperature, **self._target})
        return self._start("compute_target_logprobs", self._score_targets(body, wanted.shape))

    async def compute_target_logprobs_async(self, prompt: Any, targets: Any, *, temperature: float = 1.0) -> TensorData:
        """As ``compute_target_logprobs``, and awaits the result."""
        return await self.compute_target_logprobs(prompt, targets, temperature=temperature)

    def get_base_model(self) -> str:
        """Return the name of the base model below what answers."""
        return self._connection.loop.run(self._find_base_model())

    async def get_base_model_async(self) -> str:
        """As ``get_base_model``."""
        return await self._connection.loop.run_async(self._find_base_model())

    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer; its files come from the gateway.

        Raises:
            ImportError: transformers is missing (``pip install 'loopline[tokenizer]'``).
        """
        return self._connection.tokenizer(self.get_base_model())

    def stop(self) -> None:
        """Retire this client: it takes no more calls. Sessions and versions stay as they are."""
        self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stop()

    def _tokens(self, prompt: Any) -> list[int]:
        return to_tokens(prompt, lambda text: self.get_tokenizer().encode(text)).to_ints()

    def _start(self, name: str, work: Coroutine[Any, Any, tuple[str, T]]) -> APIFuture[T]:
        if self._stopped:
            work.close()  # never awaited, on purpose
            raise ClientStopped(f"{name}: this sampling client was stopped")
        ids: Future[tuple[str, ...]] = Future()

        async def run() -> T:
            async with self._connection.sampling_slots:
                answer_id, result = await work
            ids.set_result((answer_id,))
            return result

        return APIFuture(self._connection.loop.start(run()), ids, self._connection)

    async def _sample(self, body: bytes) -> tuple[str, SampleResponse]:
        during = f"sample from {self._name}"
        answer = await self._post(SampleResponse, "sample", body, during)
        return answer.id, answer

    async def _score(self, body: bytes, length: int) -> tuple[str, list[float | None]]:
        during = f"compute_logprobs with {self._name}"
        answer = await self._post(_Scores, "logprobs", body, during)
        logprobs = answer.logprobs or []
        if len(logprobs) != length:
            raise ResultMismatchError(f"{during}: {len(logprobs)} logprobs for {length} tokens")
        return answer.id, logprobs

    async def _score_targets(self, body: bytes, shape: list[int]) -> tuple[str, TensorData]:
        during = f"compute_target_logprobs with {self._name}"
        answer = await self._post(_Scores, "logprobs", body, during)
        logprobs = answer.logprobs if len(shape) == 1 else answer.alternative_logprobs
        try:
            found = TensorData(logprobs or [], "float32")
        except ValueError as error:
            raise ResultMismatchError(f"{during}: {error}") from None
        if found.shape != shape:
            raise ResultMismatchError(f"{during}: logprobs of shape {found.shape} for targets of shape {shape}")
        return answer.id, found

    async def _post(self, kind: type[M], verb: str, body: bytes, during: str) -> M:
        connection = self._connection
        path = f"{self._path}/{verb}"
        return await connection.transport.post(kind, path, body, during=during, timeout_s=connection.sample_timeout_s)

    async def _find_base_model(self) -> str:
        if self._base_model is None:
            during = f"get_base_model of {self._name}"
            package = await self._connection.package(self.version or "", during=during)
            self._base_model = package.base_model
        return self._base_model
