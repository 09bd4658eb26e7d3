"""What the loop needs from whatever computes. ``peft_backend`` is the real one, ``scripted`` a shipped stand-in.

A backend holds the state of *resident* sessions in memory. It is driven from one thread, one call at a time, and knows
session ids only: no projects, keys or database. A call that raises has changed nothing, unless its text says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.core.canary import Canary
from gateway.core.ids import SessionId, VersionId
from gateway.core.payloads import Forward, ForwardBackward, OptimStep
from gateway.core.results import ForwardResult, OptimStepResult
from gateway.core.scores import Likeliest, ScoreRequest
from gateway.core.sessions import ComputeRules, LoraConfig
from gateway.core.tensors import TensorData
from trainer.progress import Note, unnoted


class CorruptState(Exception):
    """A stored session state is not what this code wrote for such a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Of ``load_state``: the step counter now, and whether an accumulated gradient was thrown away."""

    optimizer_step: int
    discarded_gradient: bool


class Scorer(Protocol):
    """Scores tokens under exported adapters, beside the sessions and without touching them."""

    def attach(self, version_id: VersionId, lora: LoraConfig, directory: Path) -> None:
        """Keep the adapter in ``directory`` ready, as an engine would load it. ``lora`` is its session's config."""
        ...

    def detach(self, version_id: VersionId) -> None:
        """Forget an attached adapter; one that is not attached is fine."""
        ...

    def score(self, request: ScoreRequest) -> TensorData:
        """Return float32 log-probabilities in the shape of the targets, under the attached version or the base."""
        ...

    def likeliest(self, request: ScoreRequest) -> Likeliest:
        """Return the ``request.likeliest`` likeliest tokens at each position, under the same weights."""
        ...


class TrainingBackend(Protocol):
    """Sessions on one base model.

    Refusals that are the user's to mend are raised as ``GatewayError``; anything else is a defect.
    """

    @property
    def scorer(self) -> Scorer: ...

    @property
    def base_sha256(self) -> str:
        """Return the hash of the base model's files."""
        ...

    @property
    def rules(self) -> ComputeRules:
        """What a session is computed by that has no rules of its own yet."""
        ...

    @property
    def made_with(self) -> Mapping[str, str]:
        """What else decides over the bits: the device and its precision, versions of libraries."""
        ...

    def open(self, session_id: SessionId, lora: LoraConfig, rules: ComputeRules | None = None) -> None:
        """Make a fresh session resident; its state depends on ``lora`` alone. None: by ``rules``. Raises Invalid."""
        ...

    def close(self, session_id: SessionId) -> None:
        """Forget a resident session."""
        ...

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        """Write everything a later ``restore`` needs, an unfinished gradient window included."""
        ...

    def restore(
        self, session_id: SessionId, lora: LoraConfig, directory: Path, rules: ComputeRules | None = None
    ) -> None:
        """Make a session resident, bit-equal to when the snapshot was written. Raises CorruptState."""
        ...

    def check(self, session_id: SessionId, payload: Forward | ForwardBackward) -> None:
        """Refuse an operation that cannot be computed on this machine; the verdict depends on the operation alone.

        Raises:
            Invalid: ``memory_limit_exceeded`` names datum and limit.
        """
        ...

    def forward(self, session_id: SessionId, payload: Forward, note: Note = unnoted) -> ForwardResult:
        """Compute log-probabilities and loss; changes nothing. ``note`` hears of every few datums that are done."""
        ...

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        """As ``forward``, and add the gradient to the session's window.

        Raises:
            Invalid: ``non_finite_loss`` or ``non_finite_gradient``; the window is as before.
        """
        ...

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        """Step on the window's gradient and end the window.

        Raises:
            Invalid: ``empty_window``; or ``non_finite_gradient``, which ends the window without a step.
        """
        ...

    def discard_window(self, session_id: SessionId) -> bool:
        """Throw the accumulated gradient away; return whether there was one."""
        ...

    def load_state(self, session_id: SessionId, directory: Path, *, optimizer: bool) -> Loaded:
        """Take over the weights of a ``state`` version, and with ``optimizer`` its moments and step, else fresh ones.

        The window ends. Raises CorruptState, and Invalid ``lora_mismatch`` for another rank, scale or layers.
        """
        ...

    def load_adapter(self, session_id: SessionId, directory: Path) -> Loaded:
        """Take over the weights of an ``adapter`` version of the session's own layout, with fresh moments.

        The window ends. Raises CorruptState.
        """
        ...

    def write_imported(self, session_id: SessionId, source: Path, directory: Path) -> Canary:
        """As ``write_adapter`` with the PEFT adapter in ``source``, whose rank and scale are the session's.

        Modules that the session trains and the adapter leaves alone are written so that they change nothing.

        Raises:
            Invalid: ``bad_adapter`` names a module that the base model does not have in that shape.
        """
        ...

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        """Write the adapter as engines load it, and return its canary."""
        ...

    def write_merged(self, session_id: SessionId, directory: Path) -> None:
        """Write a full model: base plus adapter, tokenizer and generation settings included."""
        ...

    def write_state(self, session_id: SessionId, directory: Path) -> None:
        """Write a resumable ``state`` version: weights, moments and step, without an unfinished window."""
        ...

    def peak_bytes(self) -> int:
        """Return the most memory that was in use so far: the device's own, or the process' where that is the CPU."""
        ...

    def optimizer_step(self, session_id: SessionId) -> int:
        """Return how many steps the session has taken."""
        ...
