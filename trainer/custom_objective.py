"""The objective of a custom loss: its graph is evaluated datum by datum, its gradient goes back through the model."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gateway.core.custom_losses import CustomLoss, bad_graph
from gateway.core.errors import Invalid
from gateway.core.tensors import Datum
from gateway.core.validation import TARGET_TOKENS
from trainer.batching import MicroBatch, assemble, to_tensor
from trainer.graphs import Evaluator
from trainer.out_of_memory import ran_out_of_memory


class Custom:
    """``Objective`` of a custom loss: its gradient with respect to log-probabilities goes back through the model.

    The graph is evaluated on the CPU, where its clients evaluate it. ``loss_tokens`` are the targets with a gradient.
    """

    temperature = 1.0

    def __init__(self, loss: CustomLoss, data: Sequence[Datum]) -> None:
        self._loss = loss
        self._given = data
        self._evaluator = Evaluator(loss)
        self._found: dict[int, tuple[float, Mapping[str, float]]] = {}
        self._tokens = self._trained = 0
        self.data = [
            Datum(model_input=datum.model_input, loss_fn_inputs={TARGET_TOKENS: datum.loss_fn_inputs[TARGET_TOKENS]})
            for datum in data
        ]

    def assemble(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        return assemble(self.data, rows, device)

    def trained(self, batch: MicroBatch) -> Tensor:
        targets = sum(math.prod(shape) for shape in batch.shapes)
        return torch.ones(targets, dtype=torch.bool, device=batch.targets.device)

    def add(self, logprobs_Q: Tensor, trained_Q: Tensor, batch: MicroBatch, *, train: bool) -> None:
        gradients: list[Tensor] = []
        for row, logprobs in zip(batch.rows, batch.split(logprobs_Q.detach().cpu()), strict=True):
            leaf = logprobs.clone().requires_grad_(train)
            with _told_of(row), torch.set_grad_enabled(train):
                evaluated = self._evaluator.evaluate([leaf, *self._inputs(row)])
                if train:
                    gradients.append(_gradient(evaluated.loss, leaf, self._loss.loss).flatten())
            self._found[row] = (float(evaluated.loss.detach()), evaluated.metrics)
        self._tokens += logprobs_Q.numel()
        if train:
            gradient_Q = torch.cat(gradients)
            self._trained += int(gradient_Q.count_nonzero())
            logprobs_Q.backward(gradient_Q.to(logprobs_Q))  # pyright: ignore[reportUnknownMemberType]

    def metrics(self) -> Mapping[str, float]:
        found = [self._found[row] for row in sorted(self._found)]
        metrics = {"loss:sum": sum(loss for loss, _ in found), "tokens:sum": float(self._tokens)}
        metrics["loss_tokens:sum"] = float(self._trained)
        for name, _ in self._loss.metrics:
            total = sum(values[name] for _, values in found)
            metrics[name] = total / len(found) if name.endswith(":mean") else total
        return metrics

    def _inputs(self, row: int) -> list[Tensor]:
        given = self._given[row].loss_fn_inputs
        return [to_tensor(given[each.name]) for each in self._loss.inputs[1:]]


def _gradient(loss: Tensor, logprobs: Tensor, node: str) -> Tensor:
    """Return the gradient of ``loss`` with respect to ``logprobs``, in their shape; ``node`` gave the loss."""
    try:
        (gradient,) = torch.autograd.grad(loss, logprobs)
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        raise bad_graph(f"the loss has no gradient with respect to logprobs: {str(error)[:200]}", node) from None
    if not torch.isfinite(gradient).all():
        position = int((~torch.isfinite(gradient)).nonzero()[0][0].item())
        raise bad_graph(f"the gradient of the loss is not finite at position {position}", node)
    return gradient


@contextmanager
def _told_of(row: int) -> Generator[None]:
    """Say of which datum a refusal is."""
    try:
        yield
    except Invalid as error:
        raise Invalid(
            f"data[{row}]: {error.message}",
            code=error.code,
            field=f"data[{row}]",
            details={**error.details, "datum": row},
        ) from None
