"""What callers may write as a batch, how it is cut, and how the answers become one."""

from typing import Any

import numpy as np
import pytest
import torch

import loopline
from clients.python.tests.small_gateway import SmallGateway
from loopline import Datum, ModelInput, TensorData
from loopline._batch import MAX_BYTES, cut, to_datums

INPUTS = {"target_tokens": [2, 3], "weights": [1.0, 0.5]}


def no_tokenizer(text: str) -> list[int]:
    raise AssertionError(text)


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        [[1, 2]],
        (1, 2),
        [np.array([1, 2])],
        [torch.tensor([1, 2])],
        np.array([[1, 2]]),
        ModelInput.from_ints([1, 2]),
        [ModelInput.from_ints([1, 2])],
        [loopline.EncodedTextChunk(tokens=[1, 2])],
        [{"chunks": [{"tokens": [1]}, {"tokens": [2]}]}],
        [{"model_input": [1, 2]}],
        [{"prompt": "one two"}],
        "one two",
        ["one two"],
        [Datum([1, 2])],
        Datum([1, 2]),
    ],
    ids=repr,
)
def test_every_form_of_one_datum_reads_as_the_same_datum(batch: Any) -> None:
    (datum,) = to_datums(batch, INPUTS, lambda text: [1, 2])

    assert datum.to_wire() == Datum([1, 2], INPUTS).to_wire()


def test_inputs_given_with_the_call_fill_only_datums_that_carry_none() -> None:
    own = {"target_tokens": [5], "weights": [2.0]}
    batch = [Datum([1], own), {"model_input": [1, 2]}]

    first, second = to_datums(batch, INPUTS, no_tokenizer)
    assert (first, second) == (Datum([1], own), Datum([1, 2], INPUTS))
    first, second = to_datums([[1, 2], [3, 4]], [INPUTS, own], no_tokenizer)
    assert second == Datum([3, 4], own)


@pytest.mark.parametrize(
    ("batch", "inputs", "message"),
    [
        ([], None, "the batch is empty"),
        ([[1], object()], None, r"data\[1\]: expected token ids or a ModelInput, got object"),
        ([[1], [1.5]], None, r"data\[1\]: "),
        ([{"tokens": [1]}], None, r"data\[0\]: a datum has model_input"),
        ([[1]], {"weights": [float("nan")]}, r"data\[0\]: loss_fn_inputs.weights: element 0 is nan"),
        ([[1]], {"target_tokens": [0.5]}, r"data\[0\]: loss_fn_inputs.target_tokens: not a int64 value"),
        ([[1]], [INPUTS, INPUTS], "2 entries for 1 datums"),
    ],
)
def test_a_wrong_batch_is_refused_at_call_time_naming_the_datum(batch: Any, inputs: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        to_datums(batch, inputs, no_tokenizer)


def test_a_big_batch_travels_in_chunks_and_comes_back_as_one(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.metrics = lambda body: {
        "kl:mean": float(len(body["data"])),
        "tokens:max": float(len(body["data"])),
        "tokens:min": float(len(body["data"])),
    }
    batch = [Datum([n % 16], {"target_tokens": [(n + 1) % 16], "weights": [1.0]}) for n in range(2500)]

    output = training.forward_backward(batch).result()

    assert [len(gateway.recorded[seq]["body"]["data"]) for seq in (1, 2, 3)] == [1024, 1024, 452]
    tokens = torch.tensor([n % 16 for n in range(2500)])
    expected = gateway.logprobs(tokens.tolist(), (tokens + 1) % 16).detach()
    got = [datum["logprobs"].data[0] for datum in output.loss_fn_outputs]
    assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected)
    assert output.metrics["loss:sum"] == pytest.approx(-float(expected.sum()))
    assert output.metrics["kl:mean"] == pytest.approx((1024 * 1024 * 2 + 452 * 452) / 2500)
    assert (output.metrics["tokens:min"], output.metrics["tokens:max"]) == (452, 1024)
    assert (output.usage, output.cost_nanos) == ({"train": 9}, 21)


def test_chunks_stay_below_the_byte_limit_and_one_large_datum_goes_alone() -> None:
    def datum(length: int) -> Datum:
        return Datum([1] * length, {"target_tokens": [1] * length, "weights": [0.123456789] * length})

    chunks = cut([datum(10), datum(60_000), datum(60_000), datum(60_000), datum(400_000), datum(5)], "ppo", None)

    assert [(chunk.first, chunk.size) for chunk in chunks] == [(0, 4), (4, 1), (5, 1)]
    assert len(chunks[0].body) <= MAX_BYTES + 100 < len(chunks[1].body)


def test_an_error_in_a_later_chunk_names_the_datum_of_the_batch(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.refuse = lambda kind, body: (400, "bad", "data[1] is too long") if body["seq"] == 2 else None
    batch = [Datum([1], {"target_tokens": [2], "weights": [1.0]})] * 1030

    with pytest.raises(loopline.InvalidRequest, match=r"data\[1025\] is too long") as caught:
        training.forward_backward(batch).result()
    assert caught.value.field == "data[1025].model_input"
    assert caught.value.details == {"datum": 1025}


def test_a_metric_without_a_known_reduction_is_an_error_only_when_it_must_be_merged(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.metrics = lambda body: {"speed:median": 1.0}
    datum = Datum([1], {"target_tokens": [2], "weights": [1.0]})

    assert training.forward([datum]).result().metrics["speed:median"] == 1.0
    with pytest.raises(loopline.ResultMismatchError, match="speed:median"):
        training.forward([datum] * 1025).result()


def test_an_unknown_loss_is_refused_at_call_time(training: loopline.TrainingClient) -> None:
    with pytest.raises(ValueError, match="loss_fn must be one of cross_entropy, importance_sampling, ppo, cispo, dro"):
        training.forward([[1]], "dpo")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2, 3], "int64", [3]),
        ([True, False], "int64", [2]),
        ([1, 2.5], "float32", [2]),
        ([], "float32", [0]),
        ([[1, 2, 3], [4, 5, 6]], "int64", [2, 3]),
        (np.ones((2, 2), np.float64), "float32", [2, 2]),
        (np.array([1, 2], np.int16), "int64", [2]),
        (torch.ones(3, dtype=torch.bfloat16), "float32", [3]),
        (torch.tensor([True]), "int64", [1]),
        (torch.tensor(2.0), "float32", []),
    ],
    ids=repr,
)
def test_a_tensor_takes_lists_numpy_and_torch_and_gives_them_back(value: Any, dtype: str, shape: list[int]) -> None:
    tensor = TensorData(value)

    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    same = value.tolist() if hasattr(value, "tolist") else value
    assert tensor.tolist() == same
    assert tensor.to_numpy().tolist() == same
    assert tensor.to_torch().tolist() == same
    assert TensorData(**tensor.model_dump()) == tensor


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [2, 3]], "ragged"),
        ([float("inf")], "element 0 is inf"),
        (["x"], "x"),
        (None, "must be a list or an array"),
        ("text", "must be a list or an array"),
        (np.array([1j]), "complex"),
    ],
    ids=repr,
)
def test_what_is_no_tensor_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorData(value)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 2\] does not hold 3 elements"):
        TensorData([1, 2, 3], "int64", [2, 2])


def test_model_input_is_built_up_without_changing_what_was_there() -> None:
    empty = ModelInput.empty()
    longer = empty.append(loopline.EncodedTextChunk(tokens=[1, 2])).append_int(3)

    assert (empty.length, longer.length, longer.to_ints()) == (0, 3, [1, 2, 3])


@pytest.mark.parametrize("kind", [loopline.AdamParams, loopline.SamplingParams, loopline.ModelInput])
def test_unknown_fields_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        kind(momentum=0.9)
