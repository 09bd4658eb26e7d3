"""A custom loss gives the model exactly the gradient that torch would have given it directly."""

from collections.abc import Sequence

import pytest
import torch

import loopline
from clients.python.tests.small_gateway import SmallGateway
from loopline import Datum

DATA = [
    Datum([1, 2, 3], {"target_tokens": [2, 3, 4]}),
    Datum([5, 6], {"target_tokens": [6, 7], "weights": [0.5, -2.0]}),
]


def preference(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A DPO-like loss: not linear in the log-probabilities, and it couples the datums."""
    margin = logprobs[0].sum() - logprobs[1].mean() ** 2
    return -torch.nn.functional.logsigmoid(0.3 * margin), {"margin:mean": float(margin.detach())}


def test_the_accumulated_gradient_equals_that_of_direct_autograd(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    direct = SmallGateway()
    logprobs = [
        direct.logprobs(datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].to_torch()) for datum in DATA
    ]
    loss, metrics = preference(DATA, logprobs)
    loss.backward()

    output = training.forward_backward_custom(DATA, preference).result()

    assert gateway.weights.grad is not None
    assert direct.weights.grad is not None
    assert torch.allclose(gateway.weights.grad, direct.weights.grad, rtol=1e-5, atol=1e-9)
    assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert output.metrics["margin:mean"] == pytest.approx(metrics["margin:mean"], rel=1e-5)
    weights = [
        torch.tensor(datum["loss_fn_inputs"]["weights"]["data"]) for datum in gateway.recorded[2]["body"]["data"]
    ]
    surrogate = -sum(float((w.double() * lp.detach()).sum()) for w, lp in zip(weights, logprobs, strict=True))
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(surrogate, rel=1e-5)
    assert (output.usage, output.cost_nanos) == ({"train": 6}, 14)


def test_a_step_called_behind_it_comes_after_its_backward_pass(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    custom, step = training.forward_backward_custom(DATA, preference), training.optim_step()

    step.result()
    assert gateway.kinds() == ["forward", "forward_backward", "optim_step"]
    assert custom.operation_ids == ("op-2",)


def test_a_loss_that_raises_fails_the_call_and_holds_the_step_back(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    def broken(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("mine")

    custom, step = training.forward_backward_custom(DATA, broken), training.optim_step()

    with pytest.raises(ZeroDivisionError, match="mine"):
        custom.result()
    with pytest.raises(loopline.IncompleteGradient):
        step.result()
    assert gateway.kinds() == ["forward"]


def test_a_datum_the_loss_ignores_gets_weights_of_zero(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    training.forward_backward_custom(DATA, lambda data, logprobs: (logprobs[0].sum(), {})).result()

    first, second = gateway.recorded[2]["body"]["data"]
    assert first["loss_fn_inputs"]["weights"]["data"] == [-1.0, -1.0, -1.0]
    assert second["loss_fn_inputs"]["weights"]["data"] == [0.0, 0.0]


def test_a_loss_that_is_not_a_scalar_and_data_without_targets_are_refused(training: loopline.TrainingClient) -> None:
    with pytest.raises(ValueError, match=r"must return \(0-d tensor, metrics\)"):
        training.forward_backward_custom(DATA, lambda data, logprobs: (logprobs[0], {})).result()
    with pytest.raises(ValueError, match=r"data\[0\]: forward_backward_custom needs loss_fn_inputs.target_tokens"):
        training.forward_backward_custom([[1, 2]], preference)
    with pytest.raises(ValueError, match="gradient that is not finite for datum 0"):
        training.forward_backward_custom(
            DATA, lambda data, logprobs: ((logprobs[0] - logprobs[0]).sqrt().sum(), {})
        ).result()
