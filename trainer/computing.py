"""One forward or forward_backward: its micro-batches through the model, one after the other."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gateway.core.errors import Invalid
from gateway.core.payloads import Forward, ForwardBackward
from gateway.core.results import ForwardResult
from gateway.core.tensors import TensorData
from trainer.batching import MicroBatch, assemble, to_data
from trainer.losses import fills, kl_weights, token_losses, trained_positions
from trainer.metrics import Report
from trainer.passes import Passes
from trainer.progress import Note


def compute(
    passes: Passes, adapter: str, payload: Forward | ForwardBackward, device: torch.device, note: Note, *, train: bool
) -> ForwardResult:
    """Return log-probabilities and metrics; with ``train`` leave the summed gradient in the masters' ``grad``.

    Nothing outlives its micro-batch but log-probabilities: memory does not grow with the number of datums.

    Raises:
        Invalid: ``non_finite_loss`` names datum and position.
    """
    outputs: list[TensorData | None] = [None] * len(payload.data)
    report = Report(sum(datum.loss_fn_inputs["target_tokens"].size for datum in payload.data))
    rows, lean, needed = 0, 0, 0
    with passes.active(adapter, payload.data, train=train):
        for share in passes.shares(payload.data):
            batch = assemble(payload.data, share.rows, device, fills(payload.loss_fn, payload.loss_fn_config))
            trained_Q = trained_positions(payload.loss_fn, batch.inputs, payload.loss_fn_config)
            logprobs_Q = passes.logprobs(
                adapter,
                batch,
                share.tree,
                temperature=payload.loss_fn_config.get("temperature", 1.0),
                trained_Q=trained_Q if train else None,
            )
            _train_on(logprobs_Q, trained_Q, batch, payload, report, train=train)
            for row, values in zip(batch.rows, batch.split(logprobs_Q.detach()), strict=True):
                outputs[row] = to_data(values)
            needed = max(needed, passes.needs(adapter, share, batch))
            rows += batch.tokens_BT.numel() if share.tree is None else len(share.tree.tokens)
            lean += 0 if share.tree is None else len(share.rows)
            note(len(outputs) - outputs.count(None), len(outputs))
    ran: Mapping[str, float] = {
        "computed_tokens:sum": float(rows),
        "lean_decoder:mean": lean / len(outputs),
        f"compute_{str(passes.dtype).removeprefix('torch.')}:mean": 1.0,
        f"head_{str(passes.head_dtype).removeprefix('torch.')}:mean": 1.0,
        "memory_bound_bytes:max": float(needed),
    }
    return ForwardResult(
        outputs=tuple({"logprobs": output} for output in outputs if output is not None),
        metrics={**report.metrics(), **ran},
    )


def _train_on(
    logprobs_Q: Tensor,
    trained_Q: Tensor,
    batch: MicroBatch,
    payload: Forward | ForwardBackward,
    report: Report,
    *,
    train: bool,
) -> None:
    losses_Q = token_losses(payload.loss_fn, logprobs_Q, batch.inputs, payload.loss_fn_config, batch.lengths)
    _require_finite(losses_Q, logprobs_Q, batch)
    if train:
        losses_Q.sum().backward()  # pyright: ignore[reportUnknownMemberType]
    report.add(losses_Q, logprobs_Q, batch.inputs.get("logprobs"), trained_Q)
    if "ref_log_prob" in batch.inputs:
        weights_P = kl_weights(payload.loss_fn, batch.inputs)
        report.add_reference(logprobs_Q, batch.inputs["ref_log_prob"], weights_P)


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
