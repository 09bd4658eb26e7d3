"""Scores: exact log-probabilities of given tokens under one version or the base model, computed by a trainer.

A score stands outside every session's order: it reads weights that never change, so any trainer of the base model may
compute it, and compute it again when it was lost, and the numbers depend on the request alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import chain, islice

from gateway.core.catalog import BaseModel
from gateway.core.errors import GatewayError, Invalid
from gateway.core.ids import KeyId, ProjectId, ScoreId, SessionId, VersionId
from gateway.core.loss_inputs import MAX_ALTERNATIVES
from gateway.core.operations import FINAL, Status
from gateway.core.results import Failure
from gateway.core.tensors import TensorData
from gateway.core.validation import check_tokens

KEPT = timedelta(hours=24)  # how long a score can be read, whatever became of it
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What to score. ``tokens`` is int64 ``[N]``, ``targets`` int64 ``[N]`` or ``[N, K]``.

    Position t predicts ``targets[t]`` after ``tokens[: t + 1]``: the asker shifts, as in training. ``temperature``
    divides the logits. ``version_id`` None is the base model. With ``likeliest`` that many of the likeliest tokens at
    each position are told beside the targets, as the model ranks them at temperature 1.
    """

    base_model: str
    version_id: VersionId | None
    tokens: TensorData
    targets: TensorData
    temperature: float = 1.0
    likeliest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeliest:
    """The likeliest tokens at each position, best first: int64 ``[N, K]``, and their float32 log-probabilities."""

    tokens: TensorData
    logprobs: TensorData

    def rows(self) -> Iterator[Mapping[int, float]]:
        """Yield log-probabilities by token, position after position, best first."""
        width = self.tokens.shape[1]
        pairs = zip(self.tokens.values(), self.logprobs.values(), strict=True)
        for _ in range(self.tokens.shape[0]):
            yield {int(token): logprob for token, logprob in islice(pairs, width)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """``logprobs`` is float32 in the shape of the request's targets, in nats."""

    logprobs: TensorData
    likeliest: Likeliest | None = None


ScoreOutcome = ScoreResult | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A score as recorded. ``outcome`` is present exactly when the status is completed or failed.

    ``request_digest`` says what its asker asked, in the dialect's own words.
    """

    id: ScoreId
    project_id: ProjectId
    key_id: KeyId
    session_id: SessionId | None
    base_model: str
    version_id: VersionId | None
    status: Status
    request_digest: str
    created_at: datetime
    outcome: ScoreOutcome | None

    @property
    def final(self) -> bool:
        return self.status in FINAL


def score_targets(
    model: BaseModel,
    version_id: VersionId | None,
    tokens: Sequence[int],
    targets: Sequence[int],
    *,
    temperature: float = 1.0,
    likeliest: int = 0,
    tokens_field: str = "tokens",
    targets_field: str = "targets",
) -> ScoreRequest:
    """Return the request for one target per position.

    Raises:
        Invalid: no tokens or more than the context holds, another number of targets, an id out of the vocabulary, a
            temperature out of range; names field, position and limit.
    """
    _check_tokens(model, tokens, tokens_field)
    _check_length(len(targets), tokens, targets_field)
    check_tokens(targets, model, field=targets_field)
    request = _request(model, version_id, tokens, TensorData.ints(targets), temperature)
    return replace(request, likeliest=likeliest)


def score_alternatives(
    model: BaseModel,
    version_id: VersionId | None,
    tokens: Sequence[int],
    alternatives: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    tokens_field: str = "tokens",
    targets_field: str = "targets",
) -> ScoreRequest:
    """Return the request for the same number K of targets, 1 to 64, at each position.

    Raises:
        Invalid: as ``score_targets``; a row of another length than the first, or K out of range.
    """
    _check_tokens(model, tokens, tokens_field)
    _check_length(len(alternatives), tokens, targets_field)
    width = len(alternatives[0])
    if not 1 <= width <= MAX_ALTERNATIVES:
        raise Invalid(
            f"{targets_field} must have 1 to {MAX_ALTERNATIVES} ids at each position, got {width}",
            code="length_mismatch",
            field=f"{targets_field}[0]",
            details={"limit": MAX_ALTERNATIVES, "got": width},
        )
    for position, row in enumerate(alternatives):
        if len(row) != width:
            raise Invalid(
                f"{targets_field}[{position}] must have {width} ids like {targets_field}[0], got {len(row)}",
                code="length_mismatch",
                field=f"{targets_field}[{position}]",
                details={"position": position, "limit": width, "got": len(row)},
            )
        check_tokens(row, model, field=f"{targets_field}[{position}]")
    targets = TensorData.ints(chain.from_iterable(alternatives), (len(tokens), width))
    return _request(model, version_id, tokens, targets, temperature)


def check_temperature(temperature: float) -> None:
    """Raises Invalid outside 0.01 to 100."""
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise Invalid(
            f"temperature must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got {temperature}", field="temperature"
        )


def refusal_of(failure: Failure) -> GatewayError:
    """Return a failure as the error that the asker gets."""
    error = GatewayError(failure.message, code=failure.code, field=failure.field, details=failure.details)
    error.kind = failure.kind
    return error


def _request(
    model: BaseModel, version_id: VersionId | None, tokens: Sequence[int], targets: TensorData, temperature: float
) -> ScoreRequest:
    check_temperature(temperature)
    return ScoreRequest(
        base_model=model.name,
        version_id=version_id,
        tokens=TensorData.ints(tokens),
        targets=targets,
        temperature=temperature,
    )


def _check_tokens(model: BaseModel, tokens: Sequence[int], field: str) -> None:
    if not tokens:
        raise Invalid(f"{field} must hold at least one token", field=field)
    if len(tokens) > model.context_length:
        raise Invalid(
            f"{field} of {len(tokens)} tokens exceeds the context of {model.context_length} tokens",
            code="context_length_exceeded",
            field=field,
            details={"limit": model.context_length, "got": len(tokens)},
        )
    check_tokens(tokens, model, field=field)


def _check_length(count: int, tokens: Sequence[int], field: str) -> None:
    if count != len(tokens):
        raise Invalid(
            f"{field} must have one entry for each of the {len(tokens)} tokens, got {count}",
            code="length_mismatch",
            field=field,
            details={"limit": len(tokens), "got": count},
        )
