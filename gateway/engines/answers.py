"""From vLLM's JSON to core values and errors. Pure.

vLLM writes -9999.0 where a log-probability is not finite; here that is None in a prompt and an error in a sample.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from gateway.core.counts import counts_of
from gateway.core.errors import GatewayError, Internal, Invalid, Unavailable
from gateway.core.sampling import Generation, SampledSequence, SampleRequest, StopReason, TokenCounts

_NOT_FINITE = -9999.0
_VERSION_NAME = re.compile(r"\bver-[0-9a-z]{26}\b")
_MAX_MESSAGE = 500


class EngineFault(Unavailable):
    """The engine answered that it failed; it may well be alive."""

    default_code = "engine_fault"


class UnknownAdapter(Unavailable):
    """The engine does not know the adapter (any more); nothing was computed. The pool loads it and asks again."""

    default_code = "adapter_not_loaded"


class EngineLost(Unavailable):
    """No connection, or it broke: what was loaded there is unknown now."""

    default_code = "engine_lost"


def error_of(status: int, document: Any) -> GatewayError:
    """Return the error of an answer with ``status`` >= 400. Names of adapters never pass: they may be strangers'."""
    fields = _object(_object(document).get("error", document))
    message = _VERSION_NAME.sub("this model", str(fields.get("message", "")))[:_MAX_MESSAGE]
    if status == 404:
        return UnknownAdapter("the engine does not hold this model at the moment")
    if status in (401, 403):
        return Unavailable("the engine refused the gateway's key", code="engine_unauthorized")
    if status in (429, 503):
        return Unavailable("the engine is overloaded or starting", code="engine_busy")
    if status >= 500:
        return EngineFault("the engine failed while answering")
    parameter = fields.get("param")
    code = "context_length_exceeded" if "maximum context length" in message or "max_model_len" in message else None
    return Invalid(
        message or f"the engine refused the request with status {status}",
        code=code,
        field=parameter if isinstance(parameter, str) else None,
    )


def check_finished(document: Mapping[str, Any], *, aborted: bool = False) -> None:
    """Check an OpenAI answer or stream chunk: an aborted sequence is a failure, never a short answer, unless we are
    the ones who ``aborted`` it.

    Raises:
        Unavailable, Invalid: the engine aborted, failed or refused.
    """
    if document.get("error") is not None:
        raise error_of(_status_in(document["error"]), document)
    for choice in document.get("choices", ()):
        if choice.get("finish_reason") == "error" or (choice.get("finish_reason") == "abort" and not aborted):
            raise Unavailable("the engine aborted the request", code="engine_aborted")


def _status_in(error: Any) -> int:
    code = _object(error).get("code")
    return code if isinstance(code, int) and code >= 400 else 500


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def stopped_counts(document: Mapping[str, Any], *, engine: str, samples: int) -> TokenCounts | None:
    """Read what an engine had done for a call that was aborted; None: nothing.

    A prompt counts from the first token of its first sequence on, as in the engine's own counters. A choice without
    token ids must be the only one.
    """
    counts = counts_of(document["usage"], engine=engine, samples=samples)
    begun: dict[int, list[int]] = {}  # by prompt: its length, once for each sequence that has begun
    for choice in document["choices"]:
        tokens = choice.get("token_ids")
        if counts.sampled if tokens is None else tokens:
            prompt = choice.get("prompt_token_ids")
            length = counts.prompt if prompt is None else len(prompt)
            begun.setdefault(choice["index"] // samples, []).append(length)
    if not begun:
        return None
    prompt = sum(lengths[0] for lengths in begun.values())
    extra = sum(sum(lengths[1:]) for lengths in begun.values())
    return replace(counts, prompt=prompt, cached=min(prompt, counts.cached), extra_prompt=extra)


def generation_of(request: SampleRequest, document: Mapping[str, Any], *, engine: str) -> Generation:
    """Read the answer to one prompt.

    Raises:
        Unavailable: a sequence was aborted.
        Internal: a sampled token has no finite log-probability, or the answer is of another prompt.
    """
    check_finished(document)
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    if len(choices) != request.num_samples or choices[0]["prompt_token_ids"] != list(request.prompt):
        raise Internal("the engine answered another request than was asked", code="engine_answer_mismatch")
    prompt_logprobs, topk = _prompt_scores(request, choices[0].get("prompt_logprobs"))
    return Generation(
        sequences=tuple(_sequence(choice, request.topk_logprobs) for choice in choices),
        prompt_logprobs=prompt_logprobs if request.prompt_logprobs else None,
        topk_prompt_logprobs=topk if request.topk_prompt_logprobs else None,
        counts=counts_of(document["usage"], engine=engine, samples=request.num_samples),
    )


def probe_counts(document: Mapping[str, Any], *, engine: str) -> TokenCounts:
    """Read the ``usage`` of an answer that nobody pays for."""
    return counts_of(document["usage"], engine=engine, samples=1).unbilled()


def prompt_scores(tokens: Sequence[int], entries: Sequence[Mapping[str, Any] | None]) -> tuple[float | None, ...]:
    """Return the log-probability of each prompt token; None at position 0 and where it is not finite."""
    return tuple(
        None if entry is None else _finite(entry[str(token)]["logprob"])
        for token, entry in zip(tokens, entries, strict=True)
    )


def next_token_scores(targets: Sequence[int], document: Mapping[str, Any]) -> Sequence[float | None]:
    """Read, for one prompt per target, the log-probability of the target as the next token."""
    check_finished(document)
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    return [
        _finite(choice["logprobs"]["top_logprobs"][0][f"token_id:{target}"])
        for target, choice in zip(targets, choices, strict=True)
    ]


def _prompt_scores(
    request: SampleRequest, entries: Sequence[Mapping[str, Any] | None] | None
) -> tuple[tuple[float | None, ...] | None, tuple[Mapping[int, float] | None, ...] | None]:
    if entries is None:
        return None, None
    best = request.topk_prompt_logprobs
    topk = tuple(None if entry is None else _most_likely(entry, best) for entry in entries)
    return prompt_scores(request.prompt, entries), topk


def _most_likely(entry: Mapping[str, Any], count: int) -> Mapping[int, float]:
    """The chosen token is always among the entries, also when its rank is beyond ``count``: it is left out then."""
    ranked = sorted((scored["rank"], int(token), scored["logprob"]) for token, scored in entry.items())
    return {token: logprob for rank, token, logprob in ranked if rank <= count and _finite(logprob) is not None}


def _finite(logprob: float) -> float | None:
    return logprob if logprob > _NOT_FINITE else None


def _sequence(choice: Mapping[str, Any], topk: int) -> SampledSequence:
    logprobs: Sequence[float] = choice["logprobs"]["token_logprobs"]
    if len(logprobs) != len(choice["token_ids"]) or any(_finite(logprob) is None for logprob in logprobs):
        raise Internal("the engine drew a token of no finite probability", code="non_finite_logprob")
    try:
        stop_reason = StopReason(choice["finish_reason"])
    except ValueError:
        raise Unavailable("the engine ended a sequence early", code="engine_aborted") from None
    return SampledSequence(
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs),
        stop_reason=stop_reason,
        topk=tuple(_best(entry, topk) for entry in choice["logprobs"]["top_logprobs"]) if topk else None,
    )


def _best(entry: Mapping[str, float], count: int) -> Mapping[int, float]:
    """The drawn token is always among the entries, also when it is not one of the ``count`` most likely."""
    ranked = sorted(((-logprob, int(name.removeprefix("token_id:"))) for name, logprob in entry.items()))
    return {token: -negated for negated, token in ranked[:count] if _finite(-negated) is not None}
