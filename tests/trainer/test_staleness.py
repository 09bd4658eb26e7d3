"""How many versions the sampler lagged, from the datums' own words and the log of saves."""

from dataclasses import replace

import pytest

from gateway.core.errors import Invalid
from gateway.core.payloads import LossFn, Publish, SaveState, SaveWeights
from gateway.core.results import ForwardResult
from gateway.core.tensors import Datum, TensorData
from gateway.core.validation import check_forward
from tests.trainer.builders import forward_backward, policy_batch, tiny_base
from tests.trainer.world import World, drain
from trainer.scripted import ScriptedBackend
from trainer.staleness import staleness

SAVE = SaveWeights(group="policy", publish=Publish.LAZY)


def sampled_by(datum: Datum, *numbers: int) -> Datum:
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "sampler_version": TensorData.ints(numbers)})


def test_the_lag_of_a_batch_counts_the_adapters_saved_after_its_versions() -> None:
    found = staleness([0, 3, 4, 9, 9], [2, 3, 6, 9])

    assert found == {
        "staleness:mean": (4 + 2 + 2 + 0 + 0) / 5,
        "staleness:sum": 8,
        "staleness_datums:sum": 5,
        "staleness_max:max": 4,
    }


async def test_an_operation_reports_how_far_its_sampler_lagged_when_it_ran(world: World) -> None:
    session, stranger = await world.open(), await world.open()
    first, second, third = policy_batch(1, lengths=(6, 5, 7))
    data = (sampled_by(first, 1), second, sampled_by(third, 0))
    batch = forward_backward(data, LossFn.IMPORTANCE_SAMPLING)
    await world.submit(stranger, SAVE)
    trainer = world.trainer(ScriptedBackend(world.base))
    await drain(trainer)  # policy@1 is a stranger's, so the session's own adapters are 2 and 4
    operations = await world.submit(session, SAVE, SaveState(group="policy"), SAVE, batch, SAVE)

    await drain(trainer)

    outcome = (await world.read(operations[3])).outcome
    assert isinstance(outcome, ForwardResult)
    assert {name: value for name, value in outcome.metrics.items() if name.startswith("staleness")} == {
        "staleness:mean": 2,
        "staleness:sum": 4,
        "staleness_datums:sum": 2,
        "staleness_max:max": 2,
    }
    (silent,) = await world.submit(session, forward_backward((second,), LossFn.IMPORTANCE_SAMPLING))
    await drain(trainer)
    outcome = (await world.read(silent)).outcome
    assert isinstance(outcome, ForwardResult)
    assert not any(name.startswith("staleness") for name in outcome.metrics)


@pytest.mark.parametrize("numbers", [(-1,), (), (1, 2)])
def test_a_version_number_is_one_and_not_negative(numbers: tuple[int, ...], tmp_path) -> None:  # pyright: ignore
    good, bad = policy_batch(1, lengths=(3, 3))
    payload = forward_backward((good, sampled_by(bad, *numbers)), LossFn.PPO)

    with pytest.raises(Invalid) as refused:
        check_forward(payload, tiny_base(tmp_path))

    assert refused.value.field is not None
    assert refused.value.field.startswith("data[1].loss_fn_inputs.sampler_version")
