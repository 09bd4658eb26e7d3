"""A live training session: calls return at once with a future and are carried out in the order they were made."""

import logging
import warnings
from typing import Any, Self, TypeVar, get_args

from loopline._batch import Chunk, cut, to_datums
from loopline._connection import Connection
from loopline._custom_loss import CustomLoss, forward_datums, require_torch
from loopline._session import SessionCalls
from loopline._transport import encode
from loopline.errors import ClientStopped, LooplineError
from loopline.futures import APIFuture
from loopline.results import (
    Billed,
    Estimate,
    ForwardBackwardOutput,
    LoadStateResponse,
    OptimStepResponse,
    SaveStateResponse,
    SaveWeightsResponse,
    Session,
)
from loopline.sampling import SamplingClient
from loopline.types import AdamParams, LossFn, to_params

B = TypeVar("B", bound=Billed)

log = logging.getLogger("loopline")


class TrainingClient:
    """Drives one session: made by ``ServiceClient.create_lora_training_client``, not directly.

    Calls may be made from several threads; each thread's calls keep their order. As a context manager it stops the
    session at the end. Every operation has an ``*_async`` twin that returns the same future.
    """

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._session = session
        self._calls = SessionCalls(connection, session.id)
        self._stopped = False

    @property
    def session_id(self) -> str:
        return self._session.id

    @property
    def session_name(self) -> str | None:
        """The name given at creation: OpenAI clients may use it, or the id, as their ``model``."""
        return self._session.name

    @property
    def model_package_group(self) -> str:
        """The group that this session's saves become versions of."""
        return self._session.model_package_group

    @property
    def current_sequence_number(self) -> int:
        """The last seq the session has taken; 0 before the first."""
        return self._calls.last_seq

    def forward(
        self, batch: Any, loss_fn: LossFn = "cross_entropy", loss_fn_inputs: Any = None, loss_fn_config: Any = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Log-probabilities and loss of a batch under the current weights; touches no gradient."""
        chunks = self._cut(batch, loss_fn, loss_fn_inputs, loss_fn_config)
        return self._accepting("forward").begin(lambda call: self._calls.forward(call, chunks))

    def forward_backward(
        self, batch: Any, loss_fn: LossFn = "cross_entropy", loss_fn_inputs: Any = None, loss_fn_config: Any = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As ``forward``, and add the gradient of the summed loss to the session's accumulator.

        ``batch`` is a list of Datum, token lists or arrays, strings (needs the ``tokenizer`` extra), or mappings with
        ``model_input`` (or ``prompt``) and ``loss_fn_inputs``; one bare token list is one datum. ``loss_fn_inputs``
        fills the datums that carry none: one mapping for all, or a list with one each. Losses are plain sums over
        positions and datums. A large batch is cut into several operations and its answers are put together again.

        Raises:
            ValueError, TypeError: at call time, for what can be seen here; the message names the datum.
        """
        chunks = self._cut(batch, loss_fn, loss_fn_inputs, loss_fn_config)
        return self._accepting("forward_backward").begin(lambda call: self._calls.forward_backward(call, chunks))

    def forward_backward_custom(self, batch: Any, loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """As ``forward_backward`` with a loss of your own, computed here in torch.

        ``loss_fn(data, logprobs)`` gets the datums and one float32 leaf tensor ``[N]`` per datum, and returns a 0-d
        loss tensor and a dict of metrics (named ``name:reduction``). It runs on another thread. Costs a forward and
        a forward_backward. The answer's metrics are yours, ``loss:sum`` (the custom loss) and ``surrogate_loss:sum``.

        Raises:
            ImportError: torch is missing (``pip install 'loopline[torch]'``).
        """
        require_torch()
        datums = to_datums(batch, None, self._tokenize)
        chunks = cut(forward_datums(datums), "cross_entropy", None)
        calls = self._accepting("forward_backward_custom")
        return calls.begin(lambda call: calls.custom(call, datums, chunks, loss_fn))

    def optim_step(self, adam_params: AdamParams | dict[str, Any] | None = None) -> APIFuture[OptimStepResponse]:
        """One AdamW step on the accumulated gradient, which it clears."""
        body = encode({"adam_params": to_params(AdamParams, adam_params).model_dump()})
        return self._accepting("optim_step").begin(lambda call: self._calls.optim_step(call, body))

    def save_weights_for_sampler(
        self,
        description: str = "",
        merge_weights: bool = False,
        *,
        ttl_seconds: int | None = None,
        name: str | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save the current adapter, or with ``merge_weights`` a deployable full model, as a new version.

        When the result is there, an adapter version has passed its canary check and is being served. ``ttl_seconds``
        and ``name`` exist for loops written for SageMaker; they have no effect and warn.
        """
        _warn_unused("save_weights_for_sampler", ttl_seconds=ttl_seconds, name=name)
        body = encode({"merge_weights": merge_weights, "description": description})
        return self._single("save_weights", body, SaveWeightsResponse)

    def save_state(
        self,
        description: str = "",
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        name: str | None = None,
    ) -> APIFuture[SaveStateResponse]:
        """Save weights, moments and counters as a resumable version.

        ``ttl_seconds``, ``overwrite`` and ``name`` exist for loops written for SageMaker; they have no effect and warn.
        """
        _warn_unused("save_state", ttl_seconds=ttl_seconds, overwrite=overwrite or None, name=name)
        body = encode({"description": description})
        return self._single("save_state", body, SaveStateResponse)

    def load_state(self, model_package_arn: str) -> APIFuture[LoadStateResponse]:
        """Replace the weights by those of a saved state (``group@n`` or its id), with a fresh optimizer."""
        return self._load(model_package_arn, optimizer=False)

    def load_state_with_optimizer(self, model_package_arn: str) -> APIFuture[LoadStateResponse]:
        """Replace weights, moments and step count by those of a saved state (``group@n`` or its id)."""
        return self._load(model_package_arn, optimizer=True)

    def save_weights_and_get_sampling_client(
        self, description: str = "", merge_weights: bool = False, *, name: str | None = None
    ) -> SamplingClient:
        """Save the adapter, wait until it is served, and return a client pinned to exactly that version."""
        saved = self.save_weights_for_sampler(description, merge_weights, name=name).result()
        return self.create_sampling_client(saved.version)

    def create_sampling_client(self, model_package_arn: str = "") -> SamplingClient:
        """Return a client pinned to a version (``group@n`` or its id); without one, to whatever is latest at each call.

        Makes no request.
        """
        return SamplingClient(
            self._connection,
            session_id=self.session_id,
            version=model_package_arn or None,
            base_model=self._session.base_model,
        )

    def estimate(
        self,
        *,
        steps: int = 1,
        batch_size: int = 0,
        datum_tokens: int = 0,
        passes: int = 1,
        prompts: int = 0,
        prompt_tokens: int = 0,
        samples: int = 1,
        sample_tokens: int = 0,
    ) -> Estimate:
        """Return what a loop of ``steps`` equal steps costs at most, at today's prices. Runs nothing.

        A step trains ``batch_size`` datums of ``datum_tokens`` tokens ``passes`` times, and draws ``samples``
        continuations of up to ``sample_tokens`` tokens of each of ``prompts`` prompts of ``prompt_tokens`` tokens.
        """
        plan = {
            "base_model": self._session.base_model,
            "steps": steps,
            "batch_size": batch_size,
            "datum_tokens": datum_tokens,
            "passes": passes,
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "samples": samples,
            "sample_tokens": sample_tokens,
        }
        return self._connection.loop.run(
            self._connection.transport.post(Estimate, "/estimate", encode(plan), during="estimate")
        )

    def get_base_model(self) -> str:
        """Return the name of the session's base model."""
        return self._session.base_model

    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer; its files come from the gateway.

        Raises:
            ImportError: transformers is missing (``pip install 'loopline[tokenizer]'``).
        """
        return self._connection.tokenizer(self._session.base_model)

    async def forward_async(
        self, batch: Any, loss_fn: LossFn = "cross_entropy", loss_fn_inputs: Any = None, loss_fn_config: Any = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(batch, loss_fn, loss_fn_inputs, loss_fn_config)

    async def forward_backward_async(
        self, batch: Any, loss_fn: LossFn = "cross_entropy", loss_fn_inputs: Any = None, loss_fn_config: Any = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(batch, loss_fn, loss_fn_inputs, loss_fn_config)

    async def forward_backward_custom_async(self, batch: Any, loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(batch, loss_fn)

    async def optim_step_async(
        self, adam_params: AdamParams | dict[str, Any] | None = None
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(adam_params)

    async def save_weights_for_sampler_async(
        self, description: str = "", merge_weights: bool = False, **unused: Any
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_weights_for_sampler(description, merge_weights, **unused)

    async def save_state_async(self, description: str = "", **unused: Any) -> APIFuture[SaveStateResponse]:
        return self.save_state(description, **unused)

    async def load_state_async(self, model_package_arn: str) -> APIFuture[LoadStateResponse]:
        return self.load_state(model_package_arn)

    async def load_state_with_optimizer_async(self, model_package_arn: str) -> APIFuture[LoadStateResponse]:
        return self.load_state_with_optimizer(model_package_arn)

    async def save_weights_and_get_sampling_client_async(
        self, description: str = "", merge_weights: bool = False, *, name: str | None = None
    ) -> SamplingClient:
        saved = await self.save_weights_for_sampler(description, merge_weights, name=name)
        return self.create_sampling_client(saved.version)

    async def create_sampling_client_async(self, model_package_arn: str = "") -> SamplingClient:
        return self.create_sampling_client(model_package_arn)

    def stop(self) -> None:
        """Send what was called, then stop the session. Stopping twice is fine.

        The running operation finishes, queued ones are skipped: wait for the futures that matter first. What the
        session has saved stays.
        """
        self._stopped = True
        self._connection.loop.run(self._calls.stop())

    async def stop_async(self) -> None:
        """As ``stop``."""
        self._stopped = True
        await self._connection.loop.run_async(self._calls.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        except (LooplineError, TimeoutError) as error:  # must not hide what ended the block
            log.warning("session %s could not be stopped: %s", self.session_id, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.stop_async()
        except (LooplineError, TimeoutError) as error:  # must not hide what ended the block
            log.warning("session %s could not be stopped: %s", self.session_id, error)

    def _accepting(self, name: str) -> SessionCalls:
        if self._stopped:
            raise ClientStopped(f"{name}: the client of session {self.session_id} was stopped")
        return self._calls

    def _single(self, kind: str, body: bytes, result: type[B]) -> APIFuture[B]:
        calls = self._accepting(kind)
        return calls.begin(lambda call: calls.single(call, kind, body, result))

    def _load(self, version: str, *, optimizer: bool) -> APIFuture[LoadStateResponse]:
        return self._single("load_state", encode({"version": version, "optimizer": optimizer}), LoadStateResponse)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.get_tokenizer().encode(text))

    def _cut(self, batch: Any, loss_fn: str, loss_fn_inputs: Any, loss_fn_config: Any) -> list[Chunk]:
        if loss_fn not in get_args(LossFn):
            raise ValueError(f"loss_fn must be one of {', '.join(get_args(LossFn))}, got {loss_fn!r}")
        return cut(to_datums(batch, loss_fn_inputs, self._tokenize), loss_fn, loss_fn_config)


def _warn_unused(call: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        warnings.warn(f"{call}: {', '.join(given)} has no effect on a Loopline gateway", stacklevel=3)
