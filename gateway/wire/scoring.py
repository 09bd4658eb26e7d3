"""Scores for a request that waits for its answer. Shared by all dialects.

A score is recorded once per idempotency key and outlives the request that asked for it: whoever asks again under the
key waits for the same score. Without a key nobody could, so a request that gives up takes its score back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Unavailable
from gateway.core.ids import SessionId
from gateway.core.ledger import WorstCase
from gateway.core.ports import Database
from gateway.core.principals import Principal
from gateway.core.results import Failure
from gateway.core.sampling import Target
from gateway.core.scores import Score, ScoreRequest, ScoreResult, refusal_of
from gateway.core.usage import UsageFact
from gateway.core.versions import Version
from gateway.wire.deps import ScoreFutures
from gateway.wire.idempotency import reused

WAIT_S = 30.0  # below the idle timeout of common proxies


def engine_is_exact(version: Version | None, *, temperature: float = 1.0) -> bool:
    """Whether engines score a prompt exactly: at temperature 1, without a LoRA on the unembedding."""
    return temperature == 1 and (version is None or not version.lora.train_unembed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Asks for scores on behalf of one caller."""

    database: Database
    futures: ScoreFutures
    clock: Clock
    principal: Principal
    idempotency_key: str | None
    wait_s: float = WAIT_S

    async def known(self, asked: str) -> Score | None:
        """Return the score that was asked for under the key.

        Raises:
            Conflict: the key was used for another score.
        """
        if self.idempotency_key is None:
            return None
        async with self.database.read() as unit:
            score = await unit.scores.by_idempotency_key(self.principal.project_id, self.idempotency_key)
        if score is not None and score.request_digest != asked:
            raise reused()
        return score

    async def ask(self, request: ScoreRequest, *, asked: str, session_id: SessionId | None) -> Score:
        """Record a checked request; it counts as a use of the session, and holds what it costs until it is done.

        Raises:
            OutOfBudget: nothing was recorded.
        """
        async with self.database.write() as unit:
            score = await unit.scores.add(
                request,
                project_id=self.principal.project_id,
                key_id=self.principal.key_id,
                session_id=session_id,
                idempotency_key=self.idempotency_key,
                request_digest=asked,
            )
            if session_id is not None:
                await unit.sessions.touch(session_id, self.clock.now())
            await unit.ledger.hold(
                WorstCase(
                    source=score.id,
                    project_id=score.project_id,
                    key_id=score.key_id,
                    session_id=session_id,
                    base_model=score.base_model,
                    prompt=request.tokens.shape[0],
                    ours=False,
                )
            )
        return score

    async def target(self, score: Score, catalog: Catalog) -> Target:
        """Return what a score is computed with. Raises NotFound when it was deleted since."""
        base = catalog.get(score.base_model)
        if score.version_id is None:
            return Target(base=base, version=None, asker=score.project_id)
        async with self.database.read() as unit:
            return Target(base=base, version=await unit.versions.get(score.project_id, score.version_id))

    async def facts(self, score: Score) -> Sequence[UsageFact]:
        async with self.database.read() as unit:
            return await unit.usage.of_source(score.id)

    async def result(self, score: Score) -> ScoreResult:
        """Wait for a score and return its result.

        Raises:
            GatewayError: why it could not be computed.
            Unavailable: ``score_pending``, no trainer has computed it yet.
        """
        found = await self.futures.wait(self.principal.project_id, score.id, self.wait_s)
        match found.outcome:
            case ScoreResult():
                return found.outcome
            case Failure():
                raise refusal_of(found.outcome)
            case None:
                if self.idempotency_key is None:
                    async with self.database.write() as unit:
                        await unit.scores.cancel(score.id)
                raise Unavailable(
                    f"the trainer of {score.base_model} has not computed this score yet; "
                    "ask again with the same Idempotency-Key",
                    code="score_pending",
                    details={"status": found.status.value},
                )
