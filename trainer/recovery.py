"""A session's state, rebuilt: its last snapshot, then everything the log says happened since.

Nothing is billed and no result is written again. Bodies come from the log, so the same machine computes the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeVar

import structlog

from gateway.core.errors import GatewayError, Internal, Unavailable
from gateway.core.ids import SessionId
from gateway.core.operations import Operation, Status
from gateway.core.payloads import LoadState, Payload, SaveState, SaveWeights
from gateway.core.ports import Artifacts, CorruptArtifact, Work
from gateway.core.sessions import Session
from trainer import dispatch
from trainer.artifacts import read_snapshot
from trainer.backend import CorruptState, TrainingBackend
from trainer.kernels import Kernels
from trainer.operation_log import OperationLog
from trainer.out_of_memory import ran_out_of_memory
from trainer.patience import Patience

T = TypeVar("T")
MAX_LOSSES = 5
SHOW_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a rebuild took. ``note`` says how the replay differed from the first run; None: in nothing known."""

    replay_s: float = 0.0
    note: str | None = None


class RecoveryFailed(Exception):
    """A session's state is lost: going on would mean starting afresh in silence."""


class Recovery:
    """Makes sessions resident."""

    def __init__(
        self, *, backend: TrainingBackend, kernels: Kernels, log: OperationLog, artifacts: Artifacts, patience: Patience
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._log = log
        self._artifacts = artifacts
        self._patience = patience
        self._survived: dict[SessionId, int] = {}  # losses as of rebuilds that memory ran out for: no loss was added
        self._events = structlog.stdlib.get_logger("trainer")

    async def rebuild(self, work: Work) -> Rebuilt:
        """Make the session of ``work`` resident as of its ``applied_seq``, by its own rules.

        Raises:
            Invalid: the base model has no such layers to train.
            RecoveryFailed: a stored state cannot be read, a replay did not succeed, or it killed too many trainers.
            StaleLease: somebody else took over meanwhile.
            Unavailable: the process is to stop while the artefact store is away.
            MemoryError, RuntimeError: memory ran out; the next attempt is no further loss.
        """
        session, seq = work.session, work.session.snapshot.seq if work.session.snapshot else 0
        operations = await self._log.to_replay(session, seq)
        if session.snapshot is None and not operations:
            await self._kernels.run(lambda: self._backend.open(session.id, session.lora, session.rules))
            return Rebuilt()
        losses = self._losses(session)
        if losses >= MAX_LOSSES:
            raise RecoveryFailed(f"{losses} trainers in a row were lost while they rebuilt the session's state")
        await self._log.recovering(work.lease, seq=seq, losses=losses)
        started = shown = perf_counter()
        try:
            await self._start(session)
            for operation in operations:
                await self._replay(session, operation)
                if perf_counter() - shown >= SHOW_EVERY_S:
                    await self._log.recovering(work.lease, seq=operation.seq, losses=losses)
                    shown = perf_counter()
        except Unavailable:
            raise
        except (GatewayError, CorruptState, CorruptArtifact) as error:
            # the cause is logged; it may name places on disk, which are nobody else's business
            raise RecoveryFailed(f"the session's state cannot be rebuilt ({type(error).__name__})") from error
        except (MemoryError, RuntimeError) as error:
            if ran_out_of_memory(error):
                self._survived[session.id] = losses
            raise
        self._survived.pop(session.id, None)
        seconds = perf_counter() - started
        self._events.info("session_recovered", replayed=len(operations), seconds=round(seconds, 3))
        if not operations:
            return Rebuilt()
        note = _difference(session.made_with, self._backend.made_with, operations)
        if note is not None:
            self._events.warning("replayed_by_other_versions", note=note)
        return Rebuilt(replay_s=seconds, note=note)

    async def stored(self, session: Session, payload: Payload) -> dispatch.Stored | None:
        """Return what a load reads, verified; None for other payloads.

        Raises:
            NotFound, Internal: there is no such version, or it is corrupt.
            Unavailable: the process is to stop while the artefact store is away.
        """
        if not isinstance(payload, LoadState):
            return None
        version = await self._log.version(session, payload.version_id)
        try:
            await self._reading(lambda: self._artifacts.verify(version.location, version.manifest_sha256))
        except CorruptArtifact as error:
            raise Internal(f"version {version.address} cannot be read", code="corrupt_state") from error
        return dispatch.Stored(directory=self._artifacts.path(version.location), kind=version.kind)

    def _losses(self, session: Session) -> int:
        if session.recovery is None:
            return 0
        losses = session.recovery.losses
        return losses if self._survived.get(session.id) == losses else losses + 1

    async def _start(self, session: Session) -> None:
        snapshot = session.snapshot
        if snapshot is None:
            await self._kernels.run(lambda: self._backend.open(session.id, session.lora, session.rules))
        else:
            await self._reading(lambda: read_snapshot(self._artifacts, self._backend, session, snapshot))

    async def _replay(self, session: Session, operation: Operation) -> None:
        if operation.status is Status.FAILED:  # an optim_step or load_state: all it did was to end the window
            await self._kernels.run(lambda: self._backend.discard_window(session.id))
            return
        payload = await self._log.payload(session, operation)
        if isinstance(payload, SaveWeights | SaveState):
            raise ValueError(f"{operation.id} is a save; the log does not replay those")
        stored = await self.stored(session, payload)
        then = replace(session, window_broken_by=None)  # the operation completed: its window was whole
        await self._reading(lambda: dispatch.apply(self._backend, then, payload, stored))

    async def _reading(self, call: Callable[[], T]) -> T:
        """Run what reads artefacts; it changes nothing while they cannot be read."""
        return await self._patience.wait_for("artifacts", lambda: self._kernels.run(call))


def _difference(then: Mapping[str, str] | None, now: Mapping[str, str], replayed: Sequence[Operation]) -> str | None:
    """Say in words what computes otherwise now than when ``replayed`` first ran."""
    if then is None or dict(then) == dict(now):
        return None
    changes = [
        f"{name} {now.get(name, 'none')} instead of {then.get(name, 'none')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    first, last = replayed[0].seq, replayed[-1].seq
    return f"operations {first} to {last} were replayed with {', '.join(changes)}: bits may differ from the first run"
