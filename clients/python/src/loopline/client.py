"""The front door: one gateway, one key, and the clients made from it."""

import asyncio
import os
import secrets
from collections.abc import Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack, cast

import httpx
from pydantic import BaseModel

from loopline._connection import Connection
from loopline._retry import RetryPolicy
from loopline._tokenizer import BaseModels
from loopline._transport import Transport, encode, segment
from loopline.errors import ClientStopped, LooplineError
from loopline.results import ModelPackage, Session, Usage
from loopline.sampling import SamplingClient
from loopline.training import TrainingClient
from loopline.versions import Versions

T = TypeVar("T")

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0
SAMPLE_TIMEOUT_S = 600.0  # one request answers all its samples at once


LORA_OPTIONS = ("rank", "alpha", "train_attn", "train_mlp", "train_unembed", "seed", "use_rslora")


class SessionOptions(TypedDict, total=False):
    """How to open a session; what is absent or None is the gateway's default.

    ``rank`` (32) and ``alpha`` (64): the adapter's size and scale, ``alpha / rank`` (with ``use_rslora``
    ``alpha / sqrt(rank)``). ``train_attn`` (True), ``train_mlp`` (True), ``train_unembed`` (False): which layers train.
    ``seed`` fixes the adapter's initial weights.
    ``training_session_name``: the name, by which OpenAI clients reach the live session as ``model``.
    ``model_package_group``: where saves become versions. ``ttl_seconds``: an idle session expires after so long.
    """

    rank: int | None
    alpha: float | None
    train_attn: bool | None
    train_mlp: bool | None
    train_unembed: bool | None
    use_rslora: bool | None
    seed: int | None
    training_session_name: str | None
    model_package_group: str | None
    ttl_seconds: int | None
    user_metadata: Mapping[str, str] | None


class ServiceClient:
    """Makes training and sampling clients. Constructing one makes no request.

    ``base_url`` falls back to the environment's LOOPLINE_BASE_URL, then to http://127.0.0.1:8000; ``api_key`` to
    LOOPLINE_API_KEY. ``model_package_group`` is where sessions save unless they name a group, ``session_name_prefix``
    begins generated session names. ``timeout_s`` bounds one try of one request (``sample_timeout_s`` of one
    that samples or scores), ``retry`` says how long to keep trying.
    Tokenizer files are kept in ``cache_dir`` (``~/.cache/loopline``). ``transport`` replaces the network.

    Close it, or use it as a context manager, to end its background thread; sessions live on until they are stopped.

    Raises:
        ValueError: no API key, or a base URL that is not http(s).
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model_package_group: str | None = None,
        session_name_prefix: str | None = None,
        timeout_s: float = TIMEOUT_S,
        sample_timeout_s: float = SAMPLE_TIMEOUT_S,
        max_concurrent_samples: int = 64,
        retry: RetryPolicy | None = None,
        cache_dir: str | Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = base_url or os.environ.get("LOOPLINE_BASE_URL") or DEFAULT_BASE_URL
        key = api_key or os.environ.get("LOOPLINE_API_KEY")
        if not key:
            raise ValueError("no API key: pass api_key or set LOOPLINE_API_KEY (`loopline keys create` makes one)")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {url!r}")
        self._group = model_package_group
        self._prefix = session_name_prefix
        wire = Transport(
            base_url=url,
            api_key=key,
            timeout_s=timeout_s,
            max_connections=2 * max_concurrent_samples,  # samples never keep training calls waiting
            retry=retry or RetryPolicy(),
            transport=transport,
        )
        self._connection = Connection(
            wire,
            sample_timeout_s=sample_timeout_s,
            max_concurrent_samples=max_concurrent_samples,
            cache_dir=Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "loopline",
        )

    def create_lora_training_client(self, base_model: str, **options: Unpack[SessionOptions]) -> TrainingClient:
        """Open a session on ``base_model`` with a fresh LoRA adapter, and return its client; see ``SessionOptions``.

        Raises:
            ApiError: refused, for example NotFound for an unknown base model.
        """
        return self._run(self._create(base_model, options))

    async def create_lora_training_client_async(
        self, base_model: str, **options: Unpack[SessionOptions]
    ) -> TrainingClient:
        """As ``create_lora_training_client``."""
        return await self._run_async(self._create(base_model, options))

    def create_training_client_from_state(
        self, model_package_arn: str, **options: Unpack[SessionOptions]
    ) -> TrainingClient:
        """Open a session with the weights of a saved state (``group@n``) and a fresh optimizer.

        Base model and LoRA layout are the state's; options that contradict them are refused. Returns when it is loaded.
        """
        return self._run(self._resume(model_package_arn, options, optimizer=False))

    async def create_training_client_from_state_async(
        self, model_package_arn: str, **options: Unpack[SessionOptions]
    ) -> TrainingClient:
        """As ``create_training_client_from_state``."""
        return await self._run_async(self._resume(model_package_arn, options, optimizer=False))

    def create_training_client_from_state_with_optimizer(
        self, model_package_arn: str, **options: Unpack[SessionOptions]
    ) -> TrainingClient:
        """As ``create_training_client_from_state``, with the state's moments and step count too."""
        return self._run(self._resume(model_package_arn, options, optimizer=True))

    async def create_training_client_from_state_with_optimizer_async(
        self, model_package_arn: str, **options: Unpack[SessionOptions]
    ) -> TrainingClient:
        """As ``create_training_client_from_state_with_optimizer``."""
        return await self._run_async(self._resume(model_package_arn, options, optimizer=True))

    def create_sampling_client(
        self, *, base_model: str | None = None, version: str | None = None, model_package_arn: str | None = None
    ) -> SamplingClient:
        """Return a client of one version (``group@n`` or its id) or of an untrained base model; makes no request.

        ``model_package_arn`` is another name of ``version``, for loops written for SageMaker.

        Raises:
            ValueError: not exactly one of them was given.
            ClientStopped: this client is closed.
        """
        if sum(name is not None for name in (base_model, version, model_package_arn)) != 1:
            raise ValueError("give exactly one of base_model, version and model_package_arn")
        self._require_open()
        return SamplingClient(self._connection, version=version or model_package_arn, base_model=base_model)

    async def create_sampling_client_async(
        self, *, base_model: str | None = None, version: str | None = None, model_package_arn: str | None = None
    ) -> SamplingClient:
        """As ``create_sampling_client``."""
        return self.create_sampling_client(base_model=base_model, version=version, model_package_arn=model_package_arn)

    def list_base_models(self) -> list[str]:
        """Return the names of the base models the gateway trains and serves, sorted without regard to case."""
        models = self._run(self._transport.get(BaseModels, "/base_models", during="list_base_models"))
        return sorted((model.name for model in models.data), key=str.casefold)

    def list_sessions(
        self, *, name_contains: str | None = None, status_equals: str | None = None, max_results: int | None = None
    ) -> list[Session]:
        """Return the sessions of this key's project, as the gateway orders them."""

        async def collect() -> list[Session]:
            found: list[Session] = []
            async for session in self._transport.pages(Session, "/sessions", during="list_sessions"):
                if max_results is not None and len(found) >= max_results:
                    break
                if name_contains is not None and name_contains not in (session.name or ""):
                    continue
                if status_equals is not None and status_equals.lower() != session.status:
                    continue
                found.append(session)
            return found

        return self._run(collect())

    def stop_session(self, training_session: str) -> None:
        """Stop a session, by id or name. Stopping twice is fine."""
        during = f"stop_session {training_session}"
        self._run(self._transport.delete(Session, f"/sessions/{segment(training_session)}", during=during))

    def list_model_packages(
        self, *, kind: str | None = None, model_package_group: str | None = None, max_results: int | None = 10
    ) -> list[ModelPackage]:
        """Return saved versions, newest first, of one group or of all; ``max_results`` None means every one.

        ``kind`` is ``adapter``, ``merged`` or ``state``.
        """
        during = "list_model_packages"

        async def collect() -> list[ModelPackage]:
            groups = [model_package_group] if model_package_group is not None else []
            if model_package_group is None:
                listed = await self._transport.get(_Groups, "/model_packages", during=during)
                groups = [group.name for group in listed.data]
            found = [
                package
                for group in groups
                async for package in self._transport.pages(
                    ModelPackage, f"/model_packages/{segment(group)}", during=during
                )
                if kind is None or package.kind == kind
            ]
            return sorted(found, key=lambda package: (package.created_at, package.number), reverse=True)[:max_results]

        return self._run(collect())

    @property
    def versions(self) -> Versions:
        """The registry of versions."""
        self._require_open()
        return Versions(self._connection)

    def get_usage(
        self, *, session_id: str | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> Usage:
        """Return the token bill, of one session or all, of a time or all."""
        return self._run(
            self._transport.get(
                Usage,
                "/usage",
                during="get_usage",
                session_id=session_id,
                since=since and since.isoformat(),
                until=until and until.isoformat(),
            )
        )

    def close(self) -> None:
        """End the background thread; futures that are not done raise ClientStopped. Closing twice is fine."""
        self._connection.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def _transport(self) -> Transport:
        return self._connection.transport

    def _require_open(self) -> None:
        if self._connection.loop.closed:
            raise ClientStopped("this ServiceClient is closed")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._connection.loop.run(work)

    async def _run_async(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._connection.loop.run_async(work)

    async def _create(self, base_model: str, options: SessionOptions) -> TrainingClient:
        unknown = options.keys() - SessionOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
        name = options.get("training_session_name")
        if name is None and self._prefix is not None:
            name = f"{self._prefix}-{secrets.token_hex(4)}"
        lora = {key: value for key in LORA_OPTIONS if (value := options.get(key)) is not None}
        body = {
            "base_model": base_model,
            "name": name,
            "lora": lora,
            "model_package_group": options.get("model_package_group") or self._group,
            "ttl_seconds": options.get("ttl_seconds"),
            "user_metadata": options.get("user_metadata"),
        }
        content = encode({key: value for key, value in body.items() if value is not None})
        during = f"create_lora_training_client on {base_model}"
        return TrainingClient(
            self._connection, await self._transport.post(Session, "/sessions", content, during=during)
        )

    async def _resume(self, version: str, options: SessionOptions, *, optimizer: bool) -> TrainingClient:
        package = await self._connection.package(version, during=f"create_training_client_from_state of {version}")
        lora = {key: value for key, value in package.lora.items() if key in LORA_OPTIONS and key != "seed"}
        given = {key: value for key, value in options.items() if value is not None}
        training = await self._create(package.base_model, cast("SessionOptions", {**lora, **given}))
        load = training.load_state_with_optimizer if optimizer else training.load_state
        try:
            await load(version)
        except LooplineError:
            await training.stop_async()  # nobody else knows of this session
            raise
        return training


class _Group(BaseModel):
    name: str


class _Groups(BaseModel):
    data: list[_Group]
