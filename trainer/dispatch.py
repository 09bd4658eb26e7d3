"""One operation to one backend call, and what came of it.

A window of accumulated gradient ends with every optim_step and every load_state, also with failed ones: so a reader of
the log knows from kinds and statuses alone what the window holds, and a replay can rebuild it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from gateway.core.canary import Canary
from gateway.core.disk import read_failed, write_failed
from gateway.core.errors import GatewayError, Internal, Invalid
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Publish,
    SaveState,
    SaveWeights,
    billed_tokens,
)
from gateway.core.results import Failure, LoadStateResult, Outcome
from gateway.core.sessions import Session
from gateway.core.versions import Labels, VersionKind
from trainer.backend import CorruptState, TrainingBackend
from trainer.out_of_memory import ran_out_of_memory, too_large
from trainer.progress import Note, unnoted


class Poison(Internal):
    """An operation that was running when its trainer was lost, too often."""

    default_code = "poison_operation"

    def __init__(self, losses: int) -> None:
        super().__init__(
            f"the trainer was lost {losses} times while it ran this operation; it was given up",
            details={"losses": losses},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An outcome to record. ``trained_tokens`` are model-input tokens to count; 0 for a failure."""

    outcome: Outcome
    trained_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A version's files lie in the directory given. ``complete``: no publish gate stands before the operation's end."""

    kind: VersionKind
    group: str
    labels: Labels
    canary: Canary | None
    optimizer_step: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a load reads: the verified directory of a version."""

    directory: Path
    kind: VersionKind


Computed = Forward | ForwardBackward | OptimStep | LoadState
Saved = SaveWeights | SaveState


def run(
    backend: TrainingBackend, session: Session, payload: Computed, stored: Stored | None = None, note: Note = unnoted
) -> Done:
    """Run ``payload`` on a resident session; a refusal of the backend becomes a failure, a defect is raised.

    So does a pass for which memory ran out: it changed nothing. A step or a load for which it did is raised.

    Args:
        stored: what a load reads; None otherwise.
        note: hears of the datums done so far, in the calling thread.
    """
    try:
        if isinstance(payload, Forward | ForwardBackward):
            backend.check(session.id, payload)  # not in a replay: what was admitted once stays admitted
        return apply(backend, session, payload, stored, note)
    except GatewayError as error:
        if ends_window(payload):
            backend.discard_window(session.id)
        return Done(outcome=failure_of(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(payload, Forward | ForwardBackward) and ran_out_of_memory(error):
            return Done(outcome=failure_of(too_large("batch", "data")))
        raise  # weights may be half changed


def not_stored(error: OSError) -> Failure:
    """Return the failure of a save whose files could not be written: the session is as before."""
    return failure_of(write_failed(error))


def ends_window(payload: Computed) -> bool:
    """Whether the operation leaves no accumulated gradient, however it ends."""
    return isinstance(payload, OptimStep | LoadState)


def failure_of(error: GatewayError) -> Failure:
    return Failure(kind=error.kind, code=error.code, message=error.message, field=error.field, details=error.details)


def apply(
    backend: TrainingBackend, session: Session, payload: Computed, stored: Stored | None = None, note: Note = unnoted
) -> Done:
    """As ``run``, but a refusal is raised: a replay expects none.

    Raises:
        GatewayError: as the backend refused.
    """
    match payload:
        case Forward():
            result = backend.forward(session.id, payload, note)
            return Done(outcome=result, trained_tokens=billed_tokens(payload) or 0)
        case ForwardBackward():
            result = backend.forward_backward(session.id, payload, note)
            return Done(outcome=result, trained_tokens=billed_tokens(payload) or 0)
        case OptimStep():
            if session.window_broken_by is not None:
                raise _incomplete(session.window_broken_by)
            return Done(outcome=backend.optim_step(session.id, payload))
        case LoadState():
            if stored is None:
                raise ValueError("a load needs what it reads")
            try:
                if stored.kind is VersionKind.ADAPTER:
                    loaded = backend.load_adapter(session.id, stored.directory)
                else:
                    loaded = backend.load_state(session.id, stored.directory, optimizer=payload.optimizer)
            except CorruptState as error:
                raise Internal(f"version {payload.version_id} cannot be read", code="corrupt_state") from error
            except OSError as error:
                raise read_failed(error) from error
            return Done(
                outcome=LoadStateResult(
                    version_id=payload.version_id,
                    optimizer_step=loaded.optimizer_step,
                    discarded_gradient=loaded.discarded_gradient,
                )
            )
        case _:
            assert_never(payload)


def save(
    backend: TrainingBackend, session: Session, payload: Saved, directory: Path, source: Path | None = None
) -> Written:
    """Write the files of a version into ``directory``, of the session or of the upload in ``source``.

    Raises:
        GatewayError: the backend cannot.
    """
    match payload:
        case SaveWeights():
            canary = None
            if source is not None:
                canary = backend.write_imported(session.id, source, directory)
            elif payload.merge:
                backend.write_merged(session.id, directory)
            else:
                canary = backend.write_adapter(session.id, directory)
            return Written(
                kind=VersionKind.MERGED if payload.merge else VersionKind.ADAPTER,
                group=payload.group,
                labels=payload.labels,
                canary=canary,
                optimizer_step=backend.optimizer_step(session.id),
                complete=payload.merge or payload.publish is Publish.LAZY,
            )
        case SaveState():
            backend.write_state(session.id, directory)
            return Written(
                kind=VersionKind.STATE,
                group=payload.group,
                labels=payload.labels,
                canary=None,
                optimizer_step=backend.optimizer_step(session.id),
                complete=True,
            )
        case _:
            assert_never(payload)


def _incomplete(seq: int) -> Invalid:
    return Invalid(
        f"forward_backward {seq} failed, so the accumulated gradient is incomplete; it was thrown away and no step was "
        "taken. Later operations go on",
        code="incomplete_window",
        details={"seq": seq},
    )
