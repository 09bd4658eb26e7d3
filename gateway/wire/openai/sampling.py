"""How a request samples: what must hold between its fields, and every sampling field for the engine."""

from collections.abc import Mapping
from typing import Any

from gateway.core.errors import Invalid
from gateway.core.sampling import Target
from gateway.core.validation import check_tokens
from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.openai.schemas import MAX_SEQUENCES, CompletionCreate, GenerationCreate, SamplingCreate


def fitting(target: Target, prompt_tokens: int, limit: int | None, *, prompt_field: str, limit_field: str) -> int:
    """Return how many tokens the context has left after a prompt.

    Raises:
        Invalid: ``context_length_exceeded``, with both numbers.
    """
    context = target.base.context_length
    wanted = max(1, limit or 0)
    if prompt_tokens + wanted > context:
        raise Invalid(
            f"this model's maximum context length is {context} tokens, but {prompt_tokens + wanted} were requested "
            f"({prompt_tokens} in the prompt, {wanted} for the completion)",
            code="context_length_exceeded",
            field=limit_field if prompt_tokens < context else prompt_field,
            details={"limit": context, "got": prompt_tokens + wanted},
        )
    return context - prompt_tokens


def chat_limit(asked: ChatCreate) -> tuple[int | None, str]:
    if asked.max_completion_tokens is not None:
        if asked.max_tokens not in (None, asked.max_completion_tokens):
            raise Invalid("max_tokens and max_completion_tokens differ", field="max_tokens")
        return asked.max_completion_tokens, "max_completion_tokens"
    return asked.max_tokens, "max_tokens"


def samples_of(asked: SamplingCreate) -> int:
    """Return how many sequences are drawn for each prompt."""
    return (asked.best_of if isinstance(asked, CompletionCreate) else None) or asked.n or 1


def best_of(asked: CompletionCreate) -> int | None:
    """Return of how many the best are kept, if not all are."""
    if asked.best_of is None or asked.best_of == (asked.n or 1):
        return None
    if asked.best_of < (asked.n or 1):
        raise Invalid(f"best_of must be at least n, {asked.n or 1}", field="best_of")
    if asked.stream:
        raise Invalid("best_of is not available in a stream", field="best_of")
    if asked.echo:
        raise Invalid("best_of is not available with echo", field="best_of")
    return asked.best_of


def check_sampling(asked: SamplingCreate, target: Target, prompts: int, samples: int) -> None:
    check_generation(asked, target)
    check_tokens(asked.stop_token_ids or (), target.base, field="stop_token_ids")
    if prompts * samples > MAX_SEQUENCES:
        raise Invalid(
            f"prompts times n must be at most {MAX_SEQUENCES}, got {prompts * samples}",
            field="n",
            details={"limit": MAX_SEQUENCES, "got": prompts * samples},
        )
    if asked.temperature == 0 and samples > 1:
        raise Invalid("n must be 1 at temperature 0: all choices would be equal", field="n")
    if asked.stream_options is not None and not asked.stream:
        raise Invalid("stream_options needs stream to be true", field="stream_options")
    if asked.stream and asked.prompt_logprobs is not None:
        raise Invalid("prompt_logprobs is not available in a stream", field="prompt_logprobs")


def check_generation(asked: GenerationCreate, target: Target) -> None:
    base = target.base
    check_tokens(sorted(asked.logit_bias or ()), base, field="logit_bias")
    if asked.top_k == 0 or (asked.top_k or 0) > base.vocab_size:
        raise Invalid(f"top_k must be -1 or 1 to {base.vocab_size}, got {asked.top_k}", field="top_k")


def generation(asked: GenerationCreate) -> Mapping[str, Any]:
    """Return what every route says of how to sample."""
    return {
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "top_k": -1 if asked.top_k is None else asked.top_k,
        "min_p": 0.0 if asked.min_p is None else asked.min_p,
        "presence_penalty": asked.presence_penalty or 0.0,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "logit_bias": {str(token): bias for token, bias in (asked.logit_bias or {}).items()} or None,
        "skip_special_tokens": True,
    }


def sampling(asked: SamplingCreate) -> Mapping[str, Any]:
    """Return every sampling field, so that no default of an engine or a model decides."""
    return {
        **generation(asked),
        "repetition_penalty": 1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        "seed": asked.seed,
        "stop": list(asked.stop or ()),
        "prompt_logprobs": asked.prompt_logprobs,
        "stop_token_ids": list(asked.stop_token_ids or ()),
        "min_tokens": asked.min_tokens or 0,
        "ignore_eos": bool(asked.ignore_eos),
    }
