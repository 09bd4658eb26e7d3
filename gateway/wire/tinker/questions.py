"""A sampling request in the core's words. Pure."""

from dataclasses import dataclass

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.loss_inputs import MAX_ALTERNATIVES
from gateway.core.sampling import SampleRequest, SamplingParams, check_sample_request
from gateway.core.tensors import DType, TensorData
from gateway.wire.tinker.sampling_schemas import PromptAsked, SampleAsked, SamplingParamsAsked, TensorAsked
from gateway.wire.tinker.tensors import Cells, from_csr

_NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Token ids to score, int64 ``[len(prompt) - 1, K]``: row i at prompt position i + 1; -1 asks nothing.

    ``asked`` is the array as it came, whose layout the answer has.
    """

    ids: TensorData
    asked: TensorAsked

    @property
    def rows(self) -> list[list[int]]:
        """The ids by position; what asks nothing is 0."""
        width, flat = self.ids.shape[1], [max(int(id), 0) for id in self.ids.values()]
        return [flat[start : start + width] for start in range(0, len(flat), width)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask an engine, and which part of the answer was asked for.

    ``last`` restricts prompt scores to that many positions at the prompt's end; None asks for all.
    """

    request: SampleRequest
    last: int | None
    targets: Targets | None


def question_of(body: SampleAsked, model: BaseModel) -> Question:
    """Translate and check a request.

    Raises:
        Invalid: names the field.
    """
    prompt = _tokens(body.prompt)
    if body.prompt_alt_tokens_k:
        raise Invalid(
            "prompt_alt_tokens_k is not offered here; draw alternatives by sampling from prefixes of the prompt",
            code="unsupported_field",
            field="prompt_alt_tokens_k",
        )
    if body.record_stability_info:
        raise Invalid(
            "record_stability_info serves the loss stable_reinforce, which is not offered here",
            code="unsupported_field",
            field="record_stability_info",
        )
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < len(prompt)):
        raise Invalid(
            f"prompt_logprobs_last_n needs prompt_logprobs, and must be 1 to {len(prompt) - 1}, got {last}",
            field="prompt_logprobs_last_n",
        )
    request = SampleRequest(
        prompt=prompt,
        num_samples=body.num_samples,
        params=_params(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_logprobs=body.topk_sample_logprobs,
    )
    try:
        check_sample_request(request, model)
    except Invalid as error:
        if error.field == "topk_logprobs":
            error.field = "topk_sample_logprobs"
        raise
    return Question(request=request, last=last, targets=_targets(body.target_prompt_logprobs, len(prompt)))


def _targets(asked: TensorAsked | None, length: int) -> Targets | None:
    if asked is None:
        return None
    field = "target_prompt_logprobs"
    shape = tuple(asked.shape or ())
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MAX_ALTERNATIVES:
        raise Invalid(
            f"{field}.shape must be [{length - 1}, K], one row for each prompt position after the first, with K from "
            f"1 to {MAX_ALTERNATIVES}",
            code="length_mismatch",
            field=f"{field}.shape",
        )
    try:
        if asked.sparse_crow_indices is None:
            ids = TensorData.ints(asked.data, shape)
        else:
            values, columns = bytes(TensorData.ints(asked.data).data), asked.sparse_col_indices or []
            rows = asked.sparse_crow_indices
            ids = from_csr(
                values, rows, columns, shape=shape, dtype=DType.INT64, field=field, cells=Cells(), empty=_NOTHING
            )
    except Invalid as error:
        error.field = field
        raise
    return Targets(ids=ids, asked=asked)


def _tokens(prompt: PromptAsked) -> tuple[int, ...]:
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise Invalid(
                f"prompt.chunks[{index}] must be encoded text: this server's base models read text alone",
                code="unsupported_chunk",
                field=f"prompt.chunks[{index}]",
            )
        tokens += chunk.tokens
    return tuple(tokens)


def _params(asked: SamplingParamsAsked) -> SamplingParams:
    """No ``stop`` keeps the model's own end of sequence; an empty list takes that away too."""
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stop_token_ids=tuple(token for token in stop if isinstance(token, int)),
        ignore_eos=asked.stop == [],
    )
