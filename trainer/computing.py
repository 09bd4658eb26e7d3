"""One forward or forward_backward: its micro-batches through the model, one after the other."""

from collections.abc import Mapping

import torch

from gateway.core.payloads import Forward, ForwardBackward
from gateway.core.results import ForwardResult
from gateway.core.tensors import TensorData
from trainer.batching import to_data
from trainer.objectives import objective_of
from trainer.passes import Passes
from trainer.progress import Note


def compute(
    passes: Passes, adapter: str, payload: Forward | ForwardBackward, device: torch.device, note: Note, *, train: bool
) -> ForwardResult:
    """Return log-probabilities and metrics; with ``train`` leave the summed gradient in the masters' ``grad``.

    Nothing outlives its micro-batch but log-probabilities: memory does not grow with the number of datums.

    Raises:
        Invalid: ``non_finite_loss`` names datum and position, ``bad_loss_graph`` datum and node.
    """
    objective = objective_of(payload)
    data = objective.data
    outputs: list[TensorData | None] = [None] * len(data)
    rows, lean, needed = 0, 0, 0
    with passes.active(adapter, data, train=train):
        for share in passes.shares(data):
            batch = objective.assemble(share.rows, device)
            trained_Q = objective.trained(batch)
            logprobs_Q = passes.logprobs(
                adapter,
                batch,
                share.tree,
                temperature=objective.temperature,
                trained_Q=trained_Q if train else None,
            )
            objective.add(logprobs_Q, trained_Q, batch, train=train)
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
        metrics={**objective.metrics(), **ran},
    )
