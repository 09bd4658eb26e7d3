"""The codec: everything comes back equal, equal values are equal bytes, other bytes are refused."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.codec import decode_outcome, decode_payload, encode_outcome, encode_payload
from gateway.core.errors import Kind
from gateway.core.ids import VersionId
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    LossFn,
    OptimStep,
    Payload,
    Publish,
    SaveState,
    SaveWeights,
)
from gateway.core.records import CorruptRecord, digest
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, Outcome, SaveResult
from gateway.core.tensors import Datum, DType, TensorData
from gateway.core.versions import Labels

numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(st.characters(codec="utf-8"), max_size=20)
shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> TensorData:
    shape = draw(shapes)
    dtype = draw(st.sampled_from(DType))
    size = math.prod(shape)
    if dtype is DType.INT64:
        return TensorData.of(
            draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=size, max_size=size)), dtype, shape
        )
    return TensorData.of(draw(st.lists(st.floats(width=32), min_size=size, max_size=size)), dtype, shape)


named_tensors = st.dictionaries(names, tensors(), max_size=3)
metrics = st.dictionaries(names, numbers, max_size=3)
data = st.lists(st.builds(Datum, model_input=tensors(), loss_fn_inputs=named_tensors), max_size=3).map(tuple)
versions = names.map(VersionId)
labels = st.builds(
    Labels,
    name=st.none() | names,
    description=names,
    user_metadata=st.dictionaries(names, names, max_size=2),
    tags=st.lists(st.sampled_from(["a", "b:1", "c-2"]), unique=True).map(tuple),
    ttl_s=st.none() | st.integers(1, 10**6),
)
payloads: st.SearchStrategy[Payload] = st.one_of(
    st.builds(Forward, data=data, loss_fn=st.sampled_from(LossFn), loss_fn_config=metrics),
    st.builds(ForwardBackward, data=data, loss_fn=st.sampled_from(LossFn), loss_fn_config=metrics),
    st.builds(
        OptimStep,
        learning_rate=numbers,
        beta1=numbers,
        beta2=numbers,
        eps=numbers,
        weight_decay=numbers,
        grad_clip_norm=numbers,
        lora_plus_lr_ratio=numbers,
    ),
    st.builds(SaveWeights, group=names, merge=st.booleans(), publish=st.sampled_from(Publish), labels=labels),
    st.builds(SaveState, group=names, labels=labels),
    st.builds(LoadState, version_id=versions, optimizer=st.booleans()),
)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(ForwardResult, outputs=st.lists(named_tensors, max_size=3).map(tuple), metrics=metrics),
    st.builds(OptimStepResult, optimizer_step=st.integers(0, 2**40), metrics=metrics),
    st.builds(SaveResult, version_id=versions, group=names, number=st.integers(1, 2**31)),
    st.builds(
        LoadStateResult, version_id=versions, optimizer_step=st.integers(0, 2**40), discarded_gradient=st.booleans()
    ),
    st.builds(
        Failure,
        kind=st.sampled_from(Kind),
        code=names,
        message=names,
        field=st.none() | names,
        details=st.dictionaries(names, names | st.integers() | numbers, max_size=3),
    ),
)


@given(payloads)
def test_a_payload_comes_back_equal_from_equal_bytes(payload: Payload) -> None:
    record = encode_payload(payload)

    assert decode_payload(record) == payload
    assert encode_payload(decode_payload(record)) == record


@given(outcomes)
def test_an_outcome_comes_back_equal_from_equal_bytes(outcome: Outcome) -> None:
    record = encode_outcome(outcome)

    assert decode_outcome(record) == outcome
    assert encode_outcome(decode_outcome(record)) == record


@given(payloads, payloads)
def test_other_payloads_have_other_digests(one: Payload, other: Payload) -> None:
    assert (digest(encode_payload(one)) == digest(encode_payload(other))) == (one == other)


def test_the_order_of_names_does_not_change_the_bytes() -> None:
    first, second = TensorData.ints([1]), TensorData.floats([2.0])

    def payload(inputs: dict[str, TensorData], config: dict[str, float]) -> Forward:
        datum = Datum(model_input=first, loss_fn_inputs=inputs)
        return Forward(data=(datum,), loss_fn=LossFn.PPO, loss_fn_config=config)

    assert encode_payload(payload({"a": first, "b": second}, {"x": 1, "y": 2})) == encode_payload(
        payload({"b": second, "a": first}, {"y": 2.0, "x": 1.0})
    )


def test_a_forward_and_a_forward_backward_of_the_same_data_differ() -> None:
    fields = {"data": (), "loss_fn": LossFn.PPO, "loss_fn_config": {}}

    assert encode_payload(Forward(**fields)) != encode_payload(ForwardBackward(**fields))


def test_a_whole_number_and_its_float_are_one_payload() -> None:
    assert encode_payload(OptimStep(learning_rate=1)) == encode_payload(OptimStep(learning_rate=1.0))


def test_a_step_from_before_the_lora_plus_ratio_reads_as_a_ratio_of_one_and_keeps_its_digest() -> None:
    header = (
        b'{"beta1":0.9,"beta2":0.95,"eps":1e-12,"grad_clip_norm":0.0,"kind":"optim_step","learning_rate":0.0001,'
        b'"weight_decay":0.0}'
    )
    record = b"LPC1" + struct.pack("<I", len(header)) + header

    assert decode_payload(record) == OptimStep(lora_plus_lr_ratio=1.0)
    assert encode_payload(OptimStep()) == record
    assert encode_payload(OptimStep(lora_plus_lr_ratio=16.0)) != record


def test_the_digest_is_the_sha256_of_the_record() -> None:
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("decode", [decode_payload, decode_outcome])
@pytest.mark.parametrize("record", [b"", b"LPC", b"PK\x03\x04", b"LPC2\x02\x00\x00\x00{}", b"LPC1\x02\x00\x00\x00{}"])
def test_other_bytes_are_refused(decode: object, record: bytes) -> None:
    assert callable(decode)
    with pytest.raises(CorruptRecord):
        decode(record)


def test_a_payload_is_not_read_as_an_outcome() -> None:
    with pytest.raises(CorruptRecord):
        decode_outcome(encode_payload(OptimStep()))
    with pytest.raises(CorruptRecord):
        decode_payload(encode_outcome(OptimStepResult(optimizer_step=1, metrics={})))


@given(st.sampled_from([encode_payload(OptimStep()), encode_payload(SaveState(group="g"))]), st.data())
def test_a_record_cut_short_is_refused(record: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(record) - 1))

    with pytest.raises(CorruptRecord):
        decode_payload(record[:length])


def test_a_record_whose_tensor_is_cut_short_is_refused() -> None:
    payload = Forward(
        data=(Datum(model_input=TensorData.ints([1, 2, 3]), loss_fn_inputs={}),),
        loss_fn=LossFn.PPO,
        loss_fn_config={},
    )

    with pytest.raises(CorruptRecord):
        decode_payload(encode_payload(payload)[:-1])
