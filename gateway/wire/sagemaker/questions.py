"""Sampling requests in the core's words, and answers in this dialect's. Pure."""

from collections.abc import Mapping, Sequence

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.sampling import Generation, SampleRequest, SamplingParams, check_sample_request
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.tensors import tokens_of

_FIELDS = {
    "num_samples": "numSamples",
    "topk_prompt_logprobs": "topkPromptLogprobs",
    "max_tokens": "samplingParams.maxTokens",
    "temperature": "samplingParams.temperature",
    "top_p": "samplingParams.topP",
    "top_k": "samplingParams.topK",
    "seed": "samplingParams.seed",
    "stop": "samplingParams.stop",
}


def sample_request(config: Document, model: BaseModel) -> SampleRequest:
    """Translate and check a ``sample``.

    ``maxTokens`` cannot be below 512 in this dialect, so it is an upper bound: what the context leaves is another.

    Raises:
        Invalid: names the field.
    """
    where = "operationConfig.sample"
    prompt = tokens_of(config["prompt"], f"{where}.prompt")
    asked = config["samplingParams"]
    room = max(1, model.context_length - len(prompt))
    params = SamplingParams(
        max_tokens=min(asked["maxTokens"], room),
        temperature=asked.get("temperature", 1.0),
        top_p=asked.get("topP", 1.0),
        top_k=asked.get("topK", -1),
        seed=asked.get("seed"),
        stop=tuple(asked.get("stop", ())),
    )
    request = SampleRequest(
        prompt=tuple(prompt),
        num_samples=config["numSamples"],
        params=params,
        prompt_logprobs=config.get("includePromptLogprobs", False),
        topk_prompt_logprobs=config.get("topkPromptLogprobs", 0),
    )
    _check(request, model, where)
    return request


def score_request(config: Document, model: BaseModel) -> SampleRequest:
    """Translate and check a ``computeLogprobs``: engines score a prompt while they generate one greedy token.

    Raises:
        Invalid: names the field.
    """
    where = "operationConfig.computeLogprobs"
    prompt = tokens_of(config["prompt"], f"{where}.prompt")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    request = SampleRequest(prompt=tuple(prompt), params=params, prompt_logprobs=True)
    _check(request, model, where)
    return request


def sampled(generation: Generation, request: SampleRequest) -> Document:
    """Return the result of a ``sample``. The first prompt token has no log-probability; clients want a number there."""
    prompt, topk = generation.prompt_logprobs, generation.topk_prompt_logprobs
    return {
        "sequences": [
            {
                "stopReason": sequence.stop_reason.value,
                "tokens": list(sequence.tokens),
                "logprobs": list(sequence.logprobs),
                "tokenUsage": {"prefill": len(request.prompt), "decode": len(sequence.tokens)},
            }
            for sequence in generation.sequences
        ],
        "promptLogprobs": None if prompt is None else [0.0 if one is None else one for one in prompt],
        "topkPromptLogprobs": None if topk is None else [_ranked(row or {}) for row in topk],
    }


def _ranked(row: Mapping[int, float]) -> Sequence[Document]:
    ranked = sorted(row.items(), key=lambda item: -item[1])
    return [{"tokenId": token, "logprob": logprob} for token, logprob in ranked]


def _check(request: SampleRequest, model: BaseModel, where: str) -> None:
    try:
        check_sample_request(request, model)
    except Invalid as error:
        name = (error.field or "").partition("[")[0]
        spelled = _FIELDS.get(name, name)
        message = error.message.replace(name, spelled, 1) if name else error.message
        field = f"{where}.{spelled}{(error.field or '')[len(name) :]}"
        raise Invalid(message, code=error.code, field=field, details=error.details) from None
