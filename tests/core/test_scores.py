"""Score requests are checked before they exist, and keep every bit in storage."""

import pytest

from gateway.core.codec import (
    decode_score_outcome,
    decode_score_request,
    encode_payload,
    encode_score_outcome,
    encode_score_request,
)
from gateway.core.errors import Invalid, Kind
from gateway.core.ids import VersionId
from gateway.core.payloads import OptimStep
from gateway.core.records import CorruptRecord
from gateway.core.results import Failure
from gateway.core.scores import Likeliest, ScoreRequest, ScoreResult, score_alternatives, score_targets
from gateway.core.tensors import DType, TensorData
from tests.core.builders import MODEL

VERSION = VersionId("ver-1")


def test_targets_and_alternatives_have_the_shape_of_their_logprobs() -> None:
    one = score_targets(MODEL, VERSION, [1, 2, 3], [2, 3, 4], temperature=0.5)
    many = score_alternatives(MODEL, None, [1, 2], [[3, 4, 5], [6, 7, 8]])

    assert (one.version_id, one.temperature, one.targets.shape) == (VERSION, 0.5, (3,))
    assert (many.base_model, many.targets.shape, many.targets.dtype) == (MODEL.name, (2, 3), DType.INT64)
    assert list(many.targets.values()) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.009, 101.0, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(Invalid) as refused:
        score_targets(MODEL, None, [1], [2], temperature=temperature)
    assert refused.value.field == "temperature"


REQUESTS = [
    score_targets(MODEL, VERSION, [1, 2], [2, 3], temperature=0.1),
    score_targets(MODEL, VERSION, [1, 2], [2, 3], likeliest=20),
    score_alternatives(MODEL, None, [1], [[2, 3]]),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_survives_storage(request_: ScoreRequest) -> None:
    record = encode_score_request(request_)
    assert decode_score_request(record) == request_
    assert encode_score_request(decode_score_request(record)) == record


def test_an_outcome_survives_storage() -> None:
    result = ScoreResult(logprobs=TensorData.floats([-0.1, -1e-30, -88.5, -0.0], (2, 2)))
    best = Likeliest(
        tokens=TensorData.ints([9, 4, 2, 7], (2, 2)), logprobs=TensorData.floats([-1, -2, -0.5, -3], (2, 2))
    )
    assert list(best.rows()) == [{9: -1.0, 4: -2.0}, {2: -0.5, 7: -3.0}]
    ranked = ScoreResult(logprobs=TensorData.floats([-1.0, -2.0]), likeliest=best)
    failure = Failure(kind=Kind.INTERNAL, code="trainer_error", message="x", field=None, details={"position": 3})
    for outcome in (result, ranked, failure):
        assert decode_score_outcome(encode_score_outcome(outcome)) == outcome


@pytest.mark.parametrize("record", [b"", b"LPC1", encode_payload(OptimStep()), encode_score_request(REQUESTS[0])[:-1]])
def test_other_bytes_are_no_score(record: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_score_request(record)
    with pytest.raises(CorruptRecord):
        decode_score_outcome(record)
