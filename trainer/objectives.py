"""What an operation computes from log-probabilities: one of the published losses, or a custom one.

Both collect what the operation reports, micro-batch by micro-batch.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gateway.core.custom_losses import CustomLoss
from gateway.core.errors import Invalid
from gateway.core.payloads import Forward, ForwardBackward, LossFn
from gateway.core.tensors import Datum
from gateway.core.validation import TARGET_TOKENS
from trainer.batching import MicroBatch, assemble
from trainer.custom_objective import Custom
from trainer.losses import fills, kl_weights, token_losses, trained_positions
from trainer.metrics import Report


class Objective(Protocol):
    """One operation's loss. ``data`` are its datums as far as the model sees them."""

    @property
    def data(self) -> Sequence[Datum]: ...

    @property
    def temperature(self) -> float:
        """What logits are divided by, unless a datum says otherwise."""
        ...

    def assemble(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """Build the tensors of the datums ``rows``."""
        ...

    def trained(self, batch: MicroBatch) -> Tensor:
        """Return a bool ``[Q]``: which targets may receive a gradient."""
        ...

    def add(self, logprobs_Q: Tensor, trained_Q: Tensor, batch: MicroBatch, *, train: bool) -> None:
        """Compute the loss of a micro-batch and, with ``train``, run its gradient back.

        Raises:
            Invalid: ``non_finite_loss`` names datum and position; ``bad_loss_graph`` datum and node.
        """
        ...

    def metrics(self) -> Mapping[str, float]: ...


def objective_of(payload: Forward | ForwardBackward) -> Objective:
    if isinstance(payload.loss_fn, CustomLoss):
        return Custom(payload.loss_fn, payload.data)
    return Formula(payload.loss_fn, payload.loss_fn_config, payload.data)


class Formula:
    """``Objective`` of a published loss."""

    def __init__(self, loss_fn: LossFn, config: Mapping[str, float], data: Sequence[Datum]) -> None:
        self._loss_fn = loss_fn
        self._config = config
        self.data = data
        self._report = Report(sum(datum.loss_fn_inputs[TARGET_TOKENS].size for datum in data))

    @property
    def temperature(self) -> float:
        return self._config.get("temperature", 1.0)

    def assemble(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        return assemble(self.data, rows, device, fills(self._loss_fn, self._config))

    def trained(self, batch: MicroBatch) -> Tensor:
        return trained_positions(self._loss_fn, batch.inputs, self._config)

    def add(self, logprobs_Q: Tensor, trained_Q: Tensor, batch: MicroBatch, *, train: bool) -> None:
        losses_Q = token_losses(self._loss_fn, logprobs_Q, batch.inputs, self._config, batch.lengths)
        _require_finite(losses_Q, logprobs_Q, batch)
        if train:
            losses_Q.sum().backward()  # pyright: ignore[reportUnknownMemberType]
        self._report.add(losses_Q, logprobs_Q, batch.inputs.get("logprobs"), trained_Q)
        if "ref_log_prob" in batch.inputs:
            weights_P = kl_weights(self._loss_fn, batch.inputs)
            self._report.add_reference(logprobs_Q, batch.inputs["ref_log_prob"], weights_P)

    def metrics(self) -> Mapping[str, float]:
        return self._report.metrics()


def _require_finite(losses_Q: Tensor, logprobs_Q: Tensor, batch: MicroBatch) -> None:
    bad_Q = ~(torch.isfinite(losses_Q) & ~torch.isnan(logprobs_Q))
    if not bad_Q.any():
        return
    # The first datum in the operation's order, whatever order the micro-batch has.
    for datum, bad in sorted(zip(batch.rows, batch.split(bad_Q), strict=True), key=lambda pair: pair[0]):
        if bad.any():
            position = int(bad.nonzero()[0][0].item())
            raise Invalid(
                f"the loss of data[{datum}] is not finite at position {position}",
                code="non_finite_loss",
                field=f"data[{datum}]",
                details={"datum": datum, "position": position},
            )
