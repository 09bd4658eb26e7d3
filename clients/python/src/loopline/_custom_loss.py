"""A loss written in torch on the client: log-probabilities down, their gradient up.

The gateway computes ``-sum(weights * logprobs)`` for cross_entropy. With ``weights = -dC/dlogprobs`` its gradient with
respect to the model equals that of the custom loss C, by the chain rule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopline.errors import ResultMismatchError
from loopline.results import ForwardBackwardOutput
from loopline.types import Datum, TensorData

if TYPE_CHECKING:
    import torch

CustomLoss = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, float]]"]


def require_torch() -> None:
    """Check that torch is there.

    Raises:
        ImportError: it is not; says what to install.
    """
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError("forward_backward_custom needs torch: pip install 'loopline[torch]'") from error


def forward_datums(datums: Sequence[Datum]) -> list[Datum]:
    """Return the datums of the forward pass: target_tokens, and weights (zeros where absent).

    Raises:
        ValueError: a datum has no target_tokens.
    """
    prepared: list[Datum] = []
    for index, datum in enumerate(datums):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise ValueError(f"data[{index}]: forward_backward_custom needs loss_fn_inputs.target_tokens")
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData([0.0] * targets.size, "float32", targets.shape)
        prepared.append(Datum(datum.model_input, {"target_tokens": targets, "weights": weights}))
    return prepared


def surrogate(
    datums: Sequence[Datum], forward: ForwardBackwardOutput, loss: CustomLoss
) -> tuple[list[Datum], float, dict[str, float]]:
    """Run ``loss`` on the forward pass' log-probabilities.

    ``loss`` gets the caller's datums and one float32 leaf tensor ``[N]`` per datum; it returns a 0-d tensor and
    metrics.

    Returns:
        The datums of the backward pass, the custom loss, and the caller's metrics.

    Raises:
        ValueError: ``loss`` returned something else, or a gradient that is not finite.
        ResultMismatchError: the forward pass returned no log-probabilities for a datum.
    """
    import torch

    leaves: list[torch.Tensor] = []
    for index, output in enumerate(forward.loss_fn_outputs):
        if "logprobs" not in output:
            raise ResultMismatchError(f"output {index} has no logprobs")
        leaves.append(output["logprobs"].to_torch().requires_grad_())
    value, metrics = loss(list(datums), leaves)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("a custom loss must return (0-d tensor, metrics)")
    gradients: list[Any] = list(torch.autograd.grad(value.reshape(()), leaves, allow_unused=True))
    backward: list[Datum] = []
    for index, (datum, leaf, gradient) in enumerate(zip(datums, leaves, gradients, strict=True)):
        weights = torch.zeros_like(leaf) if gradient is None else -gradient
        if not bool(torch.isfinite(weights).all()):
            raise ValueError(f"the custom loss has a gradient that is not finite for datum {index}")
        inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData(weights.detach())}
        backward.append(Datum(datum.model_input, inputs))
    return backward, float(value.detach()), {name: float(metric) for name, metric in metrics.items()}
