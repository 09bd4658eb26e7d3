"""The life of the process: claim, rebuild if needed, run, report, next.

Everything that computes runs in the kernel thread; this loop and the heartbeat stay responsive meanwhile. A session's
state in memory is trusted only while its lease was held without a break and the log says that nothing else happened:
otherwise it is rebuilt from its last snapshot and the log, which gives the same bits.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import structlog

from gateway.core.clock import Clock
from gateway.core.errors import Conflict, GatewayError, Kind, Unavailable
from gateway.core.ids import SessionId, new_version_id
from gateway.core.payloads import ForwardBackward, LoadState, OptimStep, SaveState, SaveWeights
from gateway.core.ports import Artifacts, StaleLease, Wakeups, Work
from gateway.core.results import Failure, ForwardResult
from gateway.core.sessions import Session
from gateway.core.tracing import Span, SpanKind, Tracer, Unrecorded
from gateway.core.usage import TAG, Meter, UsageFact
from trainer import dispatch
from trainer.artifacts import Staged, save_version, write_snapshot
from trainer.backend import TrainingBackend
from trainer.dispatch import Done
from trainer.heartbeat import beat
from trainer.kernels import Kernels
from trainer.operation_log import OperationLog
from trainer.out_of_memory import ran_out_of_memory, short_of_memory
from trainer.patience import Patience
from trainer.progress import Watch
from trainer.recovery import Recovery, RecoveryFailed
from trainer.residents import Resident, Residents
from trainer.scoring import Scoring
from trainer.staleness import sampler_versions, staleness

MAX_LOSSES = 2
PATIENT_AFTER_S = 2.0  # without work: while others sample, looking often would take the cores from their engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The loop's numbers; see ``TrainerSettings``."""

    heartbeat_s: float
    snapshot_after_s: float
    max_resident: int


class Trainer:
    """Runs operations until ``stopping`` is set, then parks what is resident."""

    def __init__(
        self,
        *,
        backend: TrainingBackend,
        kernels: Kernels,
        log: OperationLog,
        wakeups: Wakeups,
        artifacts: Artifacts,
        clock: Clock,
        limits: Limits,
        stopping: asyncio.Event,
        tracer: Tracer | None = None,
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._log = log
        self._wakeups = wakeups
        self._artifacts = artifacts
        self._clock = clock
        self._limits = limits
        self._stopping = stopping
        self._tracer = tracer or Unrecorded()
        self._patience = Patience(stopping)
        self._recovery = Recovery(
            backend=backend, kernels=kernels, log=log, artifacts=artifacts, patience=self._patience
        )
        self._residents = Residents()
        self._scoring = Scoring(scorer=backend.scorer, kernels=kernels, log=log, artifacts=artifacts, clock=clock)
        self._events = structlog.stdlib.get_logger("trainer")

    async def run(self) -> None:
        """Serve until told to stop; then finish the running operation, write snapshots and give the leases back."""
        heartbeat = asyncio.create_task(
            beat(self._log, self._residents, every_s=self._limits.heartbeat_s), name="heartbeat"
        )
        try:
            seen, worked_at = 0, perf_counter()
            while not self._stopping.is_set():
                if heartbeat.done():
                    heartbeat.result()
                if await self.step():
                    worked_at = perf_counter()
                else:
                    seen = await self._idle(seen, patient=perf_counter() - worked_at >= PATIENT_AFTER_S)
            await self.park_all()
        except Unavailable as error:  # the database is away and nobody waits for us: the next start rebuilds
            if not self._stopping.is_set():
                raise
            self._events.warning("stopped_without_database", reason=error.message)
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    def stop(self) -> None:
        """End ``run`` after the operation that runs now."""
        self._stopping.set()

    async def step(self) -> bool:
        """Run a turn of waiting scores and one ready operation; return whether there was either."""
        for session_id in self._residents.take_lost():
            await self._drop(session_id)
        scored = await self._scoring.turn()
        work = await self._log.claim([resident.lease.session_id for resident in self._residents.all()])
        if work is None:
            return scored
        operation = work.operation
        with (
            structlog.contextvars.bound_contextvars(session_id=work.session.id, operation_id=operation.id),
            self._tracer.span(
                f"operation {operation.kind}",
                SpanKind.CONSUMER,
                parent=operation.traceparent,
                loopline__operation_id=operation.id,
                loopline__session_id=work.session.id,
                loopline__seq=operation.seq,
                loopline__base_model=work.session.base_model,
            ) as span,
        ):
            try:
                await self._run(work, span)
            except StaleLease:
                span.fail("lease_lost")
                self._events.warning("lease_lost", epoch=work.lease.epoch)
                await self._drop(work.session.id)
        return True

    async def park_all(self) -> None:
        """Write every resident session to disk and give its lease back."""
        for resident in self._residents.all():
            await self._park(resident)

    async def _idle(self, seen: int, *, patient: bool) -> int:
        """Wait for a commit, a moment (leases of lost trainers run out silently) or the end."""
        woken = asyncio.create_task(self._wakeups.wait(seen, self._limits.heartbeat_s, patient=patient))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({woken, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return woken.result() if woken.done() else seen
        finally:
            woken.cancel()
            stopped.cancel()
            await asyncio.gather(woken, stopped, return_exceptions=True)

    async def _run(self, work: Work, span: Span) -> None:
        try:
            await self._bring_in(work)
            started = perf_counter()
            done = await self._execute(work)
            seconds = perf_counter() - started
        except StaleLease:
            raise
        except Unavailable as error:  # we waited for the artefact store or the database, and are to stop
            self._events.warning("operation_given_back", reason=error.message)
            span.fail("given_back")
            await self._drop(work.session.id)
            await self._log.give_back(work)
            return
        except RecoveryFailed as error:
            self._events.error("recovery_failed", exc_info=error)
            span.fail("recovery_failed")
            await self._log.fail_session(work.lease, str(error))
            await self._drop(work.session.id)
            return
        except Exception as error:  # a defect, or no memory, ends one operation; what it left behind is not trusted
            await self._drop(work.session.id)
            failure = self._failure(error)
            span.fail(failure.code)
            await self._report(work, Done(outcome=failure))
            return
        if isinstance(done, Done) and isinstance(done.outcome, Failure):
            span.fail(done.outcome.code)
        await self._report(work, done)
        self._events.info(
            "operation_done",
            kind=work.operation.kind.value,
            seq=work.operation.seq,
            seconds=seconds,
            peak_bytes=self._backend.peak_bytes(),
        )
        await self._remember(work, seconds)

    async def _bring_in(self, work: Work) -> None:
        """Make the session resident as of its ``applied_seq``, unless it is."""
        session = work.session
        if work.losses >= MAX_LOSSES:
            raise dispatch.Poison(work.losses)
        resident = self._residents.use(session.id)
        if resident is not None:
            if resident.lease == work.lease and await self._up_to_date(resident, session):
                return
            await self._drop(session.id)
        while len(self._residents) >= self._limits.max_resident:
            await self._park(self._residents.oldest())
        self._residents.add(Resident(lease=work.lease, applied_seq=session.applied_seq, snapshot=session.snapshot))
        rebuilt = await self._recovery.rebuild(work)
        rules = session.rules or self._backend.rules
        await self._log.begin(work, rules=rules, made_with=self._backend.made_with, note=rebuilt.note)
        if (resident := self._residents.use(session.id)) is not None:
            resident.replay_s = rebuilt.replay_s

    async def _up_to_date(self, resident: Resident, session: Session) -> bool:
        """Whether what lies in memory is the session's state: between the two may only be what changes no state."""
        if resident.applied_seq == session.applied_seq:
            return True
        return resident.applied_seq < session.applied_seq and not await self._log.to_replay(
            session, resident.applied_seq
        )

    async def _execute(self, work: Work) -> Done | Staged:
        session, payload = work.session, work.payload
        if isinstance(payload, SaveWeights | SaveState):
            version_id, seq = new_version_id(), work.operation.seq
            try:
                save = partial(save_version, self._artifacts, self._backend, session, payload)
                return await self._patience.wait_for(
                    "artifacts",
                    lambda: self._kernels.run(lambda: save(version_id=version_id, lease=work.lease, seq=seq)),
                )
            except OSError as error:
                self._events.error("save_failed", exc_info=error)
                return Done(outcome=dispatch.not_stored(error))
        stored = await self._recovery.stored(session, payload)
        watch, ended = Watch(), asyncio.Event()
        watching = asyncio.create_task(
            watch.write(lambda progress: self._log.set_progress(work, progress), ended), name="progress"
        )
        try:
            done = await self._kernels.run(lambda: dispatch.run(self._backend, session, payload, stored, watch.note))
        finally:
            ended.set()
            await watching
        return await self._with_staleness(work, done)

    async def _with_staleness(self, work: Work, done: Done) -> Done:
        """Add how many versions the sampler lagged, where the datums say what sampled them."""
        sampled_by = sampler_versions(work.payload)
        if not sampled_by or not isinstance(done.outcome, ForwardResult):
            return done
        saved = await self._log.adapters_between(work.session, min(sampled_by), work.operation.seq)
        metrics = {**done.outcome.metrics, **staleness(sampled_by, saved)}
        return replace(done, outcome=replace(done.outcome, metrics=metrics))

    async def _report(self, work: Work, done: Done | Staged) -> None:
        if isinstance(done, Staged):
            try:
                await self._log.stage(work, done.version, complete=done.complete)
            except StaleLease:
                await self._remove(done.version.location)
                raise
            except Conflict as error:  # its name was taken meanwhile
                await self._remove(done.version.location)
                await self._log.finish(work, dispatch.failure_of(error), [])
            return
        facts = [_fact(work, done.trained_tokens, self._clock)] if done.trained_tokens else []
        await self._log.finish(work, done.outcome, facts)

    async def _remember(self, work: Work, seconds: float) -> None:
        """Note what is applied now, and write a snapshot when rebuilding this state would take too long."""
        resident = self._residents.use(work.session.id)
        if resident is None:
            return
        resident.applied_seq = work.operation.seq
        if isinstance(work.payload, ForwardBackward | OptimStep | LoadState):
            resident.replay_s += seconds
        # what a load read may be deleted: the state is not to depend on it for long
        if isinstance(work.payload, SaveState | LoadState) or resident.needs_snapshot(self._limits.snapshot_after_s):
            await self._snapshot(resident)

    async def _snapshot(self, resident: Resident) -> None:
        """Write a snapshot. One that cannot be written is missed by nobody yet: the log rebuilds the state."""
        previous, lease, seq = resident.snapshot, resident.lease, resident.applied_seq
        if previous is not None and previous.seq == seq:
            return
        started = perf_counter()
        try:
            snapshot = await self._kernels.run(lambda: write_snapshot(self._artifacts, self._backend, lease, seq))
        except OSError as error:
            self._events.error("snapshot_failed", session_id=lease.session_id, exc_info=error)
            return
        await self._log.snapshot_taken(lease, snapshot, self._backend.made_with)
        resident.snapshot, resident.replay_s, resident.snapshot_s = snapshot, 0.0, perf_counter() - started
        if previous is not None and previous.location != snapshot.location:
            await self._remove(previous.location)

    async def _remove(self, location: str) -> None:
        """Delete files that no row names. What cannot be deleted now, the gateway's collector deletes a day later."""
        try:
            await self._kernels.run(lambda: self._artifacts.remove(location))
        except (OSError, Unavailable) as error:
            self._events.warning("removal_failed", location=location, reason=str(error))

    async def _park(self, resident: Resident) -> None:
        """Move a session to disk: whoever claims it next goes on from there."""
        try:
            await self._snapshot(resident)
            await self._log.release(resident.lease)
        except StaleLease:
            self._events.warning("lease_lost", epoch=resident.lease.epoch)
        await self._drop(resident.lease.session_id)

    async def _drop(self, session_id: SessionId) -> None:
        self._residents.remove(session_id)
        await self._kernels.run(lambda: self._backend.close(session_id))

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, GatewayError):
            return dispatch.failure_of(error)
        if ran_out_of_memory(error):
            self._events.error("out_of_memory", reason=str(error))
            return dispatch.failure_of(short_of_memory())
        self._events.error("operation_crashed", exc_info=error)
        return Failure(
            kind=Kind.INTERNAL, code="trainer_error", message="the trainer failed while running this operation"
        )


def _fact(work: Work, tokens: int, clock: Clock) -> UsageFact:
    session: Session = work.session
    return UsageFact(
        source=work.operation.id,
        meter=Meter.TRAIN,
        quantity=tokens,
        project_id=session.project_id,
        key_id=work.operation.key_id,
        session_id=session.id,
        version_id=None,
        base_model=session.base_model,
        at=clock.now(),
        tag=session.user_metadata.get(TAG),
    )
