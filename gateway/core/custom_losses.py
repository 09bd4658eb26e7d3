"""Custom losses: a user's loss as a traced graph of allowed operations. Plain data, of which nothing can be executed.

A loss is evaluated once for each datum, on the log-probabilities of its targets and on inputs that it names; the losses
of all datums are summed. ``loss_documents`` reads and writes them, ``loss_operations`` says what is allowed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType

from gateway.core.errors import Invalid

MAX_INPUTS = 16
MAX_NODES = 256
MAX_METRICS = 32
MAX_VALUES = 64  # of the arguments of one node, nested ones included
MAX_NESTING = 4  # of one argument
MAX_INT = 2**31
MAX_NAME = 100
LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an input or of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list, or (``fixed``) a tuple."""

    items: "tuple[Argument, ...]"
    fixed: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A slice."""

    start: "Argument"
    stop: "Argument"
    step: "Argument"


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of torch, such as the dtype ``float32``."""

    kind: str
    name: str


Argument = None | bool | int | float | str | Ref | Items | Span | Constant | EllipsisType


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """``logprobs``, or an input of every datum, of ``rank`` dimensions. Nodes call it ``node``."""

    name: str
    rank: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an allowed operation."""

    name: str
    operation: str
    arguments: tuple[Argument, ...]
    options: Mapping[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """Nodes come after what they refer to. ``inputs`` begins with ``logprobs``; metrics are pairs of name and node."""

    name: str
    inputs: tuple[LossInput, ...]
    nodes: tuple[Node, ...]
    loss: str
    metrics: tuple[tuple[str, str], ...]


def bad_graph(message: str, node: str | None = None) -> Invalid:
    """Return the refusal of a loss; ``node`` is at fault."""
    return Invalid(
        message if node is None else f"node {node!r}: {message}",
        code="bad_loss_graph",
        field="graph",
        details={} if node is None else {"node": node},
    )
