"""Sampling requests: what is refused, and by which field."""

import math
from dataclasses import replace

import pytest

from gateway.core.errors import Invalid
from gateway.core.sampling import MAX_SAMPLES, SampleRequest, SamplingParams, Target, check_sample_request
from tests.core.builders import MODEL

REQUEST = SampleRequest(prompt=(1, 2, 3))


def ask(prompt: tuple[int, ...] = (1, 2, 3), num_samples: int = 1, topk: int = 0, **params: object) -> SampleRequest:
    return SampleRequest(
        prompt=prompt,
        num_samples=num_samples,
        topk_prompt_logprobs=topk,
        params=SamplingParams(**params),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        ask(tuple(range(15))),
        ask(max_tokens=13),
        ask(temperature=0.0),
        ask(temperature=2.0, top_p=0.01, top_k=512, seed=0),
        ask(num_samples=MAX_SAMPLES),
        ask(topk=20),
        ask(stop=("x" * 256,) * 15, stop_token_ids=(511,)),
    ],
)
def test_what_is_right_passes(request_: SampleRequest) -> None:
    check_sample_request(request_, MODEL)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(()), "prompt"),
        (ask((1, 512)), "prompt[1]"),
        (ask((-1,)), "prompt[0]"),
        (ask(tuple(range(16))), "prompt"),
        (ask(max_tokens=14), "max_tokens"),
        (ask(max_tokens=0), "max_tokens"),
        (ask(num_samples=0), "num_samples"),
        (ask(num_samples=MAX_SAMPLES + 1), "num_samples"),
        (ask(num_samples=2, temperature=0.0), "num_samples"),
        (ask(topk=21), "topk_prompt_logprobs"),
        (ask(topk=-1), "topk_prompt_logprobs"),
        (ask(temperature=-0.1), "temperature"),
        (ask(temperature=math.nan), "temperature"),
        (ask(temperature=2.1), "temperature"),
        (ask(top_p=0.0), "top_p"),
        (ask(top_p=1.1), "top_p"),
        (ask(top_k=0), "top_k"),
        (ask(top_k=-2), "top_k"),
        (ask(top_k=513), "top_k"),
        (ask(seed=-1), "seed"),
        (ask(seed=2**63), "seed"),
        (ask(stop=("",)), "stop[0]"),
        (ask(stop=("ok", "x" * 257)), "stop[1]"),
        (ask(stop=("x",) * 17), "stop"),
        (ask(stop_token_ids=(512,)), "stop_token_ids[0]"),
    ],
)
def test_every_refusal_names_its_field(request_: SampleRequest, field: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_sample_request(request_, MODEL)

    assert refused.value.field == field


def test_a_context_that_is_too_long_carries_both_numbers() -> None:
    with pytest.raises(Invalid) as refused:
        check_sample_request(ask(max_tokens=100), MODEL)

    assert (refused.value.code, refused.value.details) == ("context_length_exceeded", {"limit": 16, "got": 103})


def test_the_base_model_answers_under_its_own_name() -> None:
    assert Target(base=replace(MODEL, name="x"), version=None).fingerprint == "base-x"
