"""The publish gate: a version answers on an engine only after that engine was seen to compute what the trainer did."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import NoReturn, TypeVar, cast

from gateway.core.adapter_files import WEIGHTS_NAME, BadAdapter, read_adapter
from gateway.core.canary import Canary, CanaryMismatch, judge
from gateway.core.catalog import BaseModel
from gateway.core.errors import GatewayError, Invalid, Unavailable
from gateway.core.manifest import Manifest
from gateway.core.ports import Artifacts, CorruptArtifact, Probe, Probes
from gateway.core.validation import check_tokens
from gateway.core.versions import CanaryReport, Version, VersionKind
from gateway.engines.answers import EngineFault, UnknownAdapter
from gateway.engines.vllm import Count, Vllm

T = TypeVar("T")


async def admit(engine: Vllm, version: Version, base: BaseModel, artifacts: Artifacts, probes: Probes) -> CanaryReport:
    """Verify ``version``'s files, load it under its own id, and judge its canary. What fails is unloaded again, also
    when it was loaded before.

    Raises:
        CorruptArtifact: the files are not what their manifest says, or the manifest cannot be judged by.
        CanaryMismatch: the engine refuses the adapter or computes something else.
        Unavailable: the engine went away; nothing is known about the version.
    """
    try:
        return await _admitted(engine, version, base, artifacts, probes)
    except (CorruptArtifact, CanaryMismatch):
        await engine.unload_adapter(version.id)
        raise


async def _admitted(
    engine: Vllm, version: Version, base: BaseModel, artifacts: Artifacts, probes: Probes
) -> CanaryReport:
    started = time.monotonic()
    manifest = await asyncio.to_thread(_read, artifacts, version, base)
    if (manifest.kind, manifest.version_id, manifest.base_model) != (VersionKind.ADAPTER, version.id, base.name):
        raise CorruptArtifact(f"the manifest of {version.id} is of {manifest.kind} {manifest.version_id}")
    canary = _checked(manifest.canary, version, base)
    async with probes.probing(_probe(engine, version, base, canary)) as count:
        return await _judged(engine, version, base, canary, artifacts, started, count)


async def _judged(
    engine: Vllm,
    version: Version,
    base: BaseModel,
    canary: Canary,
    artifacts: Artifacts,
    started: float,
    count: Count,
) -> CanaryReport:
    await _load(engine, version, base, canary, artifacts, count)
    try:
        by_generating = version.lora.train_unembed and not engine.exact_prompt_scores
        scores, control = await _both(
            _scores(engine, version.id, canary, count, by_generating=by_generating),
            _scores(engine, base.name, canary, count, by_generating=by_generating),
        )
        seconds = time.monotonic() - started
        return judge(canary, scores, control, dtype=base.dtype, engine=engine.url, seconds=seconds)
    except (EngineFault, Invalid) as error:
        await engine.unload_adapter(version.id)
        await _refuse(engine, base, canary, error, count)


async def _both(first: Awaitable[T], second: Awaitable[T]) -> tuple[T, T]:
    """Await two calls of the engine at once. One that fails does not end the other: what it counts must be heard."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    for outcome in (one, other):
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("T", one), cast("T", other)


def _read(artifacts: Artifacts, version: Version, base: BaseModel) -> Manifest:
    """Verify the files against their hashes, then read the adapter itself: hashes only say that nothing changed since.

    Raises:
        CorruptArtifact: names the file or tensor.
    """
    manifest = artifacts.verify(version.location, version.manifest_sha256)
    if WEIGHTS_NAME in manifest.files:
        try:
            layout = read_adapter(artifacts.path(version.location))
        except (BadAdapter, OSError) as error:
            raise CorruptArtifact(f"{version.address}: {error}") from error
        if layout.rank > base.max_lora_rank:
            raise CorruptArtifact(f"{version.address} has rank {layout.rank}, engines take {base.max_lora_rank}")
    return manifest


def _probe(engine: Vllm, version: Version, base: BaseModel, canary: Canary) -> Probe:
    """Say what judging a canary costs at most: scored three times, twice of them position by position."""
    lengths = [len(tokens) for tokens in canary.tokens]
    return Probe(
        engine=engine.url,
        base_model=base.name,
        version_id=version.id,
        prompt_tokens=sum(3 * length + 2 * length * length for length in lengths),
        sample_tokens=sum(3 + 2 * length for length in lengths),
    )


async def _load(
    engine: Vllm, version: Version, base: BaseModel, canary: Canary, artifacts: Artifacts, count: Count
) -> None:
    try:
        await engine.load_adapter(version.id, artifacts.path(version.location))
    except (EngineFault, UnknownAdapter, Invalid) as error:  # the second: its files are not those of an adapter
        await _refuse(engine, base, canary, error, count)


async def _refuse(engine: Vllm, base: BaseModel, canary: Canary, error: GatewayError, count: Count) -> NoReturn:
    """The engine failed on this adapter. When it can still score the canary with the base model, the adapter is to
    blame (refused tensors, NaN in the answer); else nothing is known.

    Raises:
        CanaryMismatch, Unavailable: as said.
    """
    try:
        await engine.score(base.name, canary.tokens, count)
    except GatewayError as control:
        raise Unavailable("the engine fails for any model", code="engine_fault") from control
    raise CanaryMismatch("the engine cannot compute with this adapter", code="engine_refused_adapter") from error


def _checked(canary: Canary | None, version: Version, base: BaseModel) -> Canary:
    """Raises CorruptArtifact when nothing can be judged by ``canary``, or it must not reach the engine."""
    if canary is None or not any(len(tokens) > 1 for tokens in canary.tokens):
        raise CorruptArtifact(f"{version.id} has no canary to judge it by")
    lengths = [len(tokens) - 1 for tokens in canary.tokens]
    if any([len(row) for row in rows] != lengths for rows in (canary.logprobs, canary.base_logprobs)):
        raise CorruptArtifact(f"the canary of {version.id} has another number of log-probabilities than of tokens")
    for tokens in canary.tokens:
        if not 1 <= len(tokens) < base.context_length:
            raise CorruptArtifact(f"a canary of {version.id} has {len(tokens)} tokens")
        try:
            check_tokens(tokens, base, field="canary.tokens")
        except Invalid as error:
            raise CorruptArtifact(error.message) from None
    return canary


async def _scores(
    engine: Vllm, model: str, canary: Canary, count: Count, *, by_generating: bool
) -> Sequence[Sequence[float]]:
    if by_generating:
        scores = [await engine.score_by_generating(model, tokens, count) for tokens in canary.tokens]
    else:
        scores = await engine.score(model, canary.tokens, count)
    finite = [[score for score in sequence if score is not None] for sequence in scores]
    if sum(map(len, finite)) != sum(map(len, scores)):
        raise CanaryMismatch("the engine finds no finite probability for a token of the canary")
    return finite
