"""An engine's ``usage`` as counts: what is billed, and what the engine counted beside it."""

from collections.abc import Mapping
from typing import Any, Protocol

from gateway.core.sampling import TokenCounts


def counts_of(usage: Mapping[str, Any], *, engine: str, samples: int) -> TokenCounts:
    """Read the ``usage`` of a complete answer with ``samples`` sequences for each prompt.

    vLLM reports a prompt once per call and counts it once per sequence.
    """
    details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
    prompt: int = usage["prompt_tokens"]
    return TokenCounts(
        engine=engine,
        prompt=prompt,
        cached=min(prompt, details.get("cached_tokens") or 0),
        sampled=usage.get("completion_tokens") or 0,
        extra_prompt=prompt * (samples - 1),
    )


class Counting(Protocol):
    """Counts a stream while it runs, so that it can be cut off at any chunk."""

    def observe(self, engine: str, chunk: Mapping[str, Any], /) -> None: ...

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        ...

    def counts(self) -> TokenCounts | None:
        """Return the counts so far, None when nothing was counted."""
        ...


class StreamCounts:
    """Counts chunks of choices.

    ``prompts`` are the lengths of the prompts, each answered by ``samples`` sequences; that of a single one is a guess
    that the engine corrects. A chunk's ``usage`` counts the tokens of its own sequence so far. A prompt counts from the
    first token of its first sequence on.
    """

    def __init__(self, prompts: tuple[int, ...], samples: int) -> None:
        self._prompts = prompts
        self._samples = samples
        self._sampled: dict[int, int] = {}
        self._cached = 0
        self._ended = 0
        self._engine = ""

    def observe(self, engine: str, chunk: Mapping[str, Any]) -> None:
        self._engine = engine
        usage: Mapping[str, Any] = chunk.get("usage") or {}
        details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
        self._cached = max(self._cached, details.get("cached_tokens") or 0)
        if len(self._prompts) == 1 and usage.get("prompt_tokens"):
            self._prompts = (usage["prompt_tokens"],)
        for choice in chunk.get("choices") or ():
            index: int = choice["index"]
            before = self._sampled.get(index, 0)
            with_ids = before + len(choice.get("token_ids") or ())
            self._sampled[index] = max(with_ids, usage.get("completion_tokens") or 0)
            self._ended += choice.get("finish_reason") is not None

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return self._ended >= len(self._prompts) * self._samples

    def counts(self) -> TokenCounts | None:
        """Return the counts so far, None when no token was generated."""
        begun = [index // self._samples for index, sampled in self._sampled.items() if sampled]
        if not begun:
            return None
        prompt = sum(self._prompts[index] for index in set(begun))
        return TokenCounts(
            engine=self._engine,
            prompt=prompt,
            cached=min(prompt, self._cached),
            sampled=sum(self._sampled.values()),
            extra_prompt=sum(self._prompts[index] for index in begun) - prompt,
        )


class ResponseCounts:
    """Counts the events of one streamed response: the engine says its counts in the last one."""

    def __init__(self) -> None:
        self._counts: TokenCounts | None = None
        self.ended = False

    def observe(self, engine: str, event: Mapping[str, Any]) -> None:
        if event.get("type") in RESPONSE_ENDS:
            self.ended = True
            self._counts = response_counts(event["response"], engine=engine)

    def counts(self) -> TokenCounts | None:
        return self._counts


RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def response_counts(response: Mapping[str, Any], *, engine: str) -> TokenCounts | None:
    """Read the ``usage`` of a response; None when no token was generated."""
    usage: Mapping[str, Any] = response.get("usage") or {}
    if not usage.get("output_tokens"):
        return None
    details: Mapping[str, Any] = usage.get("input_tokens_details") or {}
    prompt: int = usage["input_tokens"]
    return TokenCounts(
        engine=engine,
        prompt=prompt,
        cached=min(prompt, details.get("cached_tokens") or 0),
        sampled=usage["output_tokens"],
    )
