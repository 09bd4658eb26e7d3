"""Custom losses from functions, by the ``tinker`` SDK's own tracer and the dialect's translation."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from gateway.core.custom_losses import CustomLoss
from gateway.core.loss_documents import read_loss
from gateway.wire.tinker.loss_schemas import CreateLossAsked
from gateway.wire.tinker.losses import document_of


def asked(
    function: Callable[..., Any], ranks: Mapping[str, int], *, session: str = "s", number: int = 0
) -> dict[str, Any]:
    """Return the body with which the SDK would have the server keep ``function``."""
    handle = trace_loss(function, ranks, session)
    graph = encode_graph(handle).model_dump(mode="json")
    body = {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": handle.name,
        "inputs": [each.model_dump(mode="json") for each in handle.inputs],
        "graph": graph,
        "type": "create_custom_loss",
    }
    return json.loads(json.dumps(body))


def traced(function: Callable[..., Any], ranks: Mapping[str, int]) -> CustomLoss:
    return read_loss(document_of(CreateLossAsked.model_validate(asked(function, ranks))))
