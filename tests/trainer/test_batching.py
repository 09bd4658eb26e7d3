"""Micro-batches: what may share one, and that nothing leaks between neighbours."""

import random
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import batch, policy_batch
from trainer.batching import assemble, plan, to_data, to_tensor


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), budget=st.integers(1, 2000))
def test_every_datum_is_computed_once_within_the_budget_and_with_little_padding(
    lengths: list[int], budget: int
) -> None:
    groups = plan(lengths, budget)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert len(group) == 1 or longest * len(group) <= budget
        assert sum(lengths[index] for index in group) >= 0.75 * longest * len(group)


def test_rows_are_padded_and_inputs_are_not() -> None:
    data = batch(1, lengths=(5, 3))

    made = assemble(data, (0, 1), torch.device("cpu"))

    assert made.tokens_BT.shape == (2, 5)
    assert made.real_BT.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert made.targets.tolist() == [
        *data[0].loss_fn_inputs["target_tokens"].values(),
        *data[1].loss_fn_inputs["target_tokens"].values(),
    ]
    assert made.inputs["weights"].shape == (8,)


def test_a_datum_without_the_optional_weights_beside_one_with_them_weighs_one() -> None:
    plain, weighted = policy_batch(1, lengths=(3, 3))
    weighted = Datum(
        model_input=weighted.model_input,
        loss_fn_inputs={**weighted.loss_fn_inputs, "weights": TensorData.floats([0.5, 0.0, 2.0])},
    )

    made = assemble((plain, weighted), (0, 1), torch.device("cpu"))

    assert made.inputs["weights"].tolist() == [1.0, 1.0, 1.0, 0.5, 0.0, 2.0]


def test_targets_with_alternatives_are_padded_beside_plain_ones_and_split_into_their_own_shapes() -> None:
    plain, wide = batch(1, lengths=(2, 3))
    table = TensorData.ints(range(6), (3, 2))
    wide = replace(wide, loss_fn_inputs={"target_tokens": table, "weights": TensorData.floats(range(6), (3, 2))})

    made = assemble((plain, wide), (0, 1), torch.device("cpu"))

    assert made.real_PK is not None
    assert made.targets[2:].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert made.targets[made.real_PK].tolist() == [*plain.loss_fn_inputs["target_tokens"].values(), *range(6)]
    assert [part.tolist() for part in made.split(made.inputs["weights"])][1] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_temperature_of_the_datum_goes_before_that_of_the_operation() -> None:
    plain, hot, mixed = policy_batch(1, lengths=(2, 2, 2))
    hot = replace(hot, loss_fn_inputs={**hot.loss_fn_inputs, "temperature": TensorData.floats([0.5])})
    mixed = replace(mixed, loss_fn_inputs={**mixed.loss_fn_inputs, "temperature": TensorData.floats([1.0, 2.0])})

    made = assemble((plain, hot, mixed), (0, 1, 2), torch.device("cpu"), {"temperature": 1.5})

    assert made.temperature_P is not None
    assert made.temperature_P.tolist() == [1.5, 1.5, 0.5, 0.5, 1.0, 2.0]
    assert "temperature" not in made.inputs
    assert assemble((plain,), (0,), torch.device("cpu")).temperature_P is None


def test_tensors_cross_the_border_unchanged() -> None:
    values = [random.Random(0).uniform(-9, 9) for _ in range(7)]
    packed = TensorData.floats(values)

    assert to_data(to_tensor(packed)) == packed
    assert to_tensor(TensorData.ints([3, 2**40])).tolist() == [3, 2**40]
