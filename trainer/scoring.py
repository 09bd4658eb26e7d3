"""A turn of scoring between two operations: bounded, so that neither kind of work waits long for the other.

A score needs no session and no order. The versions asked for last stay attached; their files are hashed before they
are read, so what is scored is what the publish gate let through.
"""

from collections import OrderedDict

import structlog

from gateway.core.clock import Clock
from gateway.core.errors import GatewayError, Kind
from gateway.core.ids import VersionId
from gateway.core.ports import Artifacts, CorruptArtifact, ScoreWork, StaleLease
from gateway.core.results import Failure
from gateway.core.scores import ScoreOutcome, ScoreResult
from gateway.core.usage import Meter, UsageFact
from trainer.backend import Scorer
from trainer.dispatch import failure_of
from trainer.kernels import Kernels
from trainer.operation_log import OperationLog
from trainer.out_of_memory import ran_out_of_memory, too_large

TOKENS_A_TURN = 4096
MAX_ATTEMPTS = 2
MAX_ATTACHED = 4  # float32 adapters in memory beside the sessions'


class Scoring:
    """Claims scores of this trainer's base model, computes and reports them."""

    def __init__(
        self, *, scorer: Scorer, kernels: Kernels, log: OperationLog, artifacts: Artifacts, clock: Clock
    ) -> None:
        self._scorer = scorer
        self._kernels = kernels
        self._log = log
        self._artifacts = artifacts
        self._clock = clock
        self._attached: OrderedDict[VersionId, None] = OrderedDict()  # least recently used first
        self._events = structlog.stdlib.get_logger("trainer")

    async def turn(self) -> bool:
        """Compute what waits until a turn's tokens are used up; return whether anything waited."""
        tokens = 0
        while tokens < TOKENS_A_TURN and (work := await self._log.claim_score()) is not None:
            with structlog.contextvars.bound_contextvars(score_id=work.score.id):
                await self._run(work)
            tokens += work.request.tokens.size
        return tokens > 0

    async def _run(self, work: ScoreWork) -> None:
        outcome = await self._outcome(work)
        facts = [self._fact(work)] if isinstance(outcome, ScoreResult) else []
        try:
            await self._log.finish_score(work, outcome, facts)
        except StaleLease:
            self._events.warning("score_lost", attempts=work.attempts)

    async def _outcome(self, work: ScoreWork) -> ScoreOutcome:
        if work.attempts > MAX_ATTEMPTS:
            return Failure(
                kind=Kind.INTERNAL,
                code="poison_score",
                message=f"the trainer was lost {MAX_ATTEMPTS} times while it computed this score; it was given up",
                details={"attempts": work.attempts},
            )
        if work.version is None and work.request.version_id is not None:
            return Failure(kind=Kind.NOT_FOUND, code="unknown_version", message="no such version", field="version")
        try:
            return await self._kernels.run(lambda: self._compute(work))
        except GatewayError as error:
            return failure_of(error)
        except CorruptArtifact as error:
            self._events.error("score_version_corrupt", exc_info=error)
            return Failure(kind=Kind.INTERNAL, code="corrupt_artifact", message=str(error))
        except Exception as error:  # a defect, or no memory, ends one score; what it left behind is not trusted
            await self._kernels.run(lambda: self._detach(work.request.version_id))
            if ran_out_of_memory(error):
                self._events.error("out_of_memory", reason=str(error))
                return failure_of(too_large("score", "prompt"))
            self._events.error("score_crashed", exc_info=error)
            return Failure(
                kind=Kind.INTERNAL, code="trainer_error", message="the trainer failed while computing this score"
            )

    def _compute(self, work: ScoreWork) -> ScoreOutcome:
        self._attach(work)
        logprobs = self._scorer.score(work.request)
        if (position := logprobs.first_non_finite()) is not None:
            return Failure(
                kind=Kind.INTERNAL,
                code="non_finite_logprob",
                message="a log-probability is not finite under these weights",
                details={"position": position // (logprobs.size // work.request.tokens.size)},
            )
        likeliest = self._scorer.likeliest(work.request) if work.request.likeliest else None
        return ScoreResult(logprobs=logprobs, likeliest=likeliest)

    def _attach(self, work: ScoreWork) -> None:
        version = work.version
        if version is None:
            return
        if version.id not in self._attached:
            while len(self._attached) >= MAX_ATTACHED:
                self._detach(next(iter(self._attached)))
            self._artifacts.verify(version.location, version.manifest_sha256)
            self._scorer.attach(version.id, version.lora, self._artifacts.path(version.location))
        self._attached[version.id] = None
        self._attached.move_to_end(version.id)

    def _detach(self, version_id: VersionId | None) -> None:
        if version_id is not None:
            self._attached.pop(version_id, None)
            self._scorer.detach(version_id)

    def _fact(self, work: ScoreWork) -> UsageFact:
        score = work.score
        return UsageFact(
            source=score.id,
            meter=Meter.PREFILL,
            quantity=work.request.tokens.size,
            project_id=score.project_id,
            key_id=score.key_id,
            session_id=score.session_id,
            version_id=score.version_id,
            base_model=score.base_model,
            at=self._clock.now(),
        )
