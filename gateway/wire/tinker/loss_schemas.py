"""Custom losses as the ``tinker`` SDK sends them. See ``schemas``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.wire.tinker.schemas import Asked, Text

MAX_LOSSES = 256  # of one program


class LossInput(Asked):
    """One input of a custom loss."""

    name: str
    rank: Literal[0, 1, 2]


class LossNode(Asked):
    """One node of a traced loss, as ``torch.fx`` records it; arguments are encoded."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Text
    target: Text
    args: list[Any]
    kwargs: dict[str, Any]


class LossGraph(Asked):
    """A traced loss, its nodes in the order of execution."""

    format: Literal[1] = 1
    nodes: list[LossNode]


class CreateLossAsked(Asked):
    """Keep a custom loss."""

    session_id: str
    custom_loss_seq_id: Annotated[int, Field(ge=0, lt=MAX_LOSSES)]
    name: Text
    inputs: list[LossInput]
    graph: LossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"
