"""How many versions the sampler of a batch lagged behind, for operations whose datums say which version sampled them.

A datum says so with the loss input ``sampler_version``: the number of a version in the session's own group, 0 for the
base model. Its lag counts the adapters that the session saved into that group since, and before the operation.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from gateway.core.custom_losses import CustomLoss
from gateway.core.loss_inputs import SAMPLER_VERSION
from gateway.core.payloads import Forward, ForwardBackward, Payload


def sampler_versions(payload: Payload) -> Sequence[int]:
    """Return the number given by each datum that has one."""
    if not isinstance(payload, Forward | ForwardBackward) or isinstance(payload.loss_fn, CustomLoss):
        return ()
    given = [datum.loss_fn_inputs.get(SAMPLER_VERSION) for datum in payload.data]
    return [int(tensor.values()[0]) for tensor in given if tensor is not None]


def staleness(sampled_by: Sequence[int], saved: Sequence[int]) -> Mapping[str, float]:
    """Return the metrics of a batch.

    Args:
        sampled_by: version numbers, at least one.
        saved: ascending numbers of the session's adapters before the operation, at least those above the lowest of
            ``sampled_by``.
    """
    lags = [len(saved) - bisect_right(saved, number) for number in sampled_by]
    return {
        "staleness:mean": sum(lags) / len(lags),
        "staleness:sum": float(sum(lags)),
        "staleness_datums:sum": float(len(lags)),
        "staleness_max:max": float(max(lags)),
    }
