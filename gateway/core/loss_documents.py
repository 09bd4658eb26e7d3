"""Custom losses as documents of JSON: what is stored, and what is made of a client's own.

Example::

    {"name": "neg_ll",
     "inputs": [["logprobs", 1, "logprobs"], ["weights", 1, "w"]],     name, rank, what nodes call it
     "nodes": [["mul", "operator.mul", [{"ref": "logprobs"}, {"ref": "w"}], {}],
               ["sum_1", "Tensor.sum", [{"ref": "mul"}], {}]],         name, operation, arguments, options
     "loss": "sum_1",
     "metrics": [["custom/neg_ll:sum", "sum_1"]]}

An argument is a JSON scalar, a list, or an object of one key: ``ref`` (an input or an earlier node), ``tuple``,
``slice`` (start, stop, step), ``ellipsis``, or a constant of torch (``dtype``, ``device``, ``memory_format``).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, cast

from gateway.core.custom_losses import (
    LOGPROBS,
    MAX_INPUTS,
    MAX_INT,
    MAX_METRICS,
    MAX_NAME,
    MAX_NESTING,
    MAX_NODES,
    MAX_VALUES,
    Argument,
    Constant,
    CustomLoss,
    Items,
    LossInput,
    Node,
    Ref,
    Span,
    bad_graph,
)
from gateway.core.loss_operations import ATTRIBUTES, CONSTANTS, OPERATIONS, OPTIONS

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}", re.ASCII)
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]{0,32}", re.ASCII)


def read_loss(document: Mapping[str, Any]) -> CustomLoss:
    """Read a document that anybody may have written.

    Raises:
        Invalid: ``bad_loss_graph`` names the node: an operation, argument or option that is not allowed, a reference
            to what does not come before (a cycle), a number that is not finite, too much of anything.
    """
    inputs = _inputs(document.get("inputs"))
    known = {each.node for each in inputs}
    nodes: list[Node] = []
    for row in _rows(document.get("nodes"), 4, MAX_NODES, "nodes"):
        node = _node(row, known)
        known.add(node.name)
        nodes.append(node)
    made = {node.name for node in nodes}
    loss = document.get("loss")
    if not isinstance(loss, str) or loss not in made:
        raise bad_graph(f"loss must name a node, got {str(loss)[:100]!r}")
    metrics = [(str(name), str(node)) for name, node in _rows(document.get("metrics"), 2, MAX_METRICS, "metrics")]
    for name, node in metrics:
        if not _METRIC.fullmatch(name):
            raise bad_graph(f"metric {name[:100]!r} must be called custom/<name>:sum or custom/<name>:mean")
        if node not in known:
            raise bad_graph(f"metric {name!r} must name a node, got {node[:100]!r}")
    if len({name for name, _ in metrics}) != len(metrics):
        raise bad_graph("metrics must have different names")
    return CustomLoss(
        name=_title(document.get("name")),
        inputs=inputs,
        nodes=tuple(nodes),
        loss=loss,
        metrics=tuple(metrics),
    )


def write_loss(loss: CustomLoss) -> dict[str, Any]:
    """Return the document of ``loss``; ``read_loss`` reads it."""
    return {
        "name": loss.name,
        "inputs": [[each.name, each.rank, each.node] for each in loss.inputs],
        "nodes": [
            [
                node.name,
                node.operation,
                [_written(argument) for argument in node.arguments],
                {name: _written(argument) for name, argument in node.options.items()},
            ]
            for node in loss.nodes
        ],
        "loss": loss.loss,
        "metrics": [list(pair) for pair in loss.metrics],
    }


def dump_loss(loss: CustomLoss) -> bytes:
    """Return the document of ``loss`` as bytes; equal losses give equal bytes."""
    return json.dumps(write_loss(loss), sort_keys=True, separators=(",", ":")).encode()


def load_loss(content: bytes) -> CustomLoss:
    """Read what ``dump_loss`` wrote."""
    return read_loss(json.loads(content))


def _inputs(given: Any) -> tuple[LossInput, ...]:
    inputs: list[LossInput] = []
    for name, rank, node in _rows(given, 3, MAX_INPUTS, "inputs"):
        name = _word(name, _INPUT, "the name of an input")
        if type(rank) is not int or not (0 if inputs else 1) <= rank <= 2:
            raise bad_graph(f"input {name!r} must have rank 0, 1 or 2 (logprobs: 1 or 2), got {str(rank)[:20]}")
        inputs.append(LossInput(name=name, rank=rank, node=_word(node, _NAME, f"what nodes call input {name!r}")))
    if not inputs or inputs[0].name != LOGPROBS:
        raise bad_graph(f"the first input must be {LOGPROBS}")
    for names in ({each.name for each in inputs}, {each.node for each in inputs}):
        if len(names) != len(inputs):
            raise bad_graph("inputs must have different names")
    return tuple(inputs)


def _node(row: Sequence[Any], known: set[str]) -> Node:
    name, operation = _word(row[0], _NAME, "the name of a node"), row[1]
    if name in known:
        raise bad_graph("another node or input has this name", name)
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise bad_graph(
            f"{str(operation)[:100]!r} is not among the operations of a loss here; pass the function itself to "
            "forward_backward_custom, and it is evaluated on the client",
            name,
        )
    reader = _ArgumentReader(name, known)
    arguments, options = row[2], row[3]
    if not isinstance(arguments, list) or not isinstance(options, dict):
        raise bad_graph("arguments must be a list and options an object", name)
    for option in cast("dict[str, Any]", options):
        if option not in OPTIONS:
            raise bad_graph(f"{operation} takes no option {option[:100]!r} here", name)
    node = Node(
        name=name,
        operation=operation,
        arguments=tuple(reader.read(each) for each in cast("list[Any]", arguments)),
        options={option: reader.read(each) for option, each in cast("dict[str, Any]", options).items()},
    )
    if operation == "getattr" and (len(node.arguments) != 2 or node.options or node.arguments[1] not in ATTRIBUTES):
        raise bad_graph(f"getattr reads one of {', '.join(sorted(ATTRIBUTES))}", name)
    return node


class _ArgumentReader:
    """Reads the arguments of one node."""

    def __init__(self, node: str, known: set[str]) -> None:
        self._node = node
        self._known = known
        self._left = MAX_VALUES

    def read(self, given: Any, depth: int = 0) -> Argument:
        self._left -= 1
        if self._left < 0 or depth > MAX_NESTING:
            raise bad_graph(f"more than {MAX_VALUES} values, or nested deeper than {MAX_NESTING}", self._node)
        match given:
            case None | bool():
                return given
            case int() if abs(given) <= MAX_INT:
                return given
            case float() if math.isfinite(given):
                return given
            case str() if _WORD.fullmatch(given):
                return given
            case list():
                return Items(self._many(cast("list[Any]", given), depth), fixed=False)
            case dict() if len(cast("dict[str, Any]", given)) == 1:
                ((kind, value),) = cast("dict[str, Any]", given).items()
                return self._tagged(kind, value, depth)
            case _:
                raise bad_graph(
                    f"argument {str(given)[:100]!r}: numbers must be finite and within {MAX_INT}, texts short words",
                    self._node,
                )

    def _tagged(self, kind: str, value: Any, depth: int) -> Argument:
        match kind, value:
            case "ref", str():
                if value not in self._known:
                    raise bad_graph(
                        f"refers to {value[:100]!r}, which does not come before it: a loss has no cycles", self._node
                    )
                return Ref(value)
            case "tuple", list():
                return Items(self._many(cast("list[Any]", value), depth), fixed=True)
            case "slice", [start, stop, step]:
                return Span(*self._many([start, stop, step], depth))
            case "ellipsis", True:
                return ...
            case (("dtype" | "device" | "memory_format"), str()) if value in CONSTANTS[kind]:
                return Constant(kind, value)
            case "float", _:
                raise bad_graph(f"the constant {str(value)[:20]} is not finite", self._node)
            case _:
                raise bad_graph(f"{kind[:40]} {str(value)[:60]!r} is no argument of a loss here", self._node)

    def _many(self, given: Sequence[Any], depth: int) -> tuple[Argument, ...]:
        return tuple(self.read(each, depth + 1) for each in given)


def _written(argument: Argument) -> Any:
    match argument:
        case Ref(name):
            return {"ref": name}
        case Items(items, fixed):
            written = [_written(each) for each in items]
            return {"tuple": written} if fixed else written
        case Span(start, stop, step):
            return {"slice": [_written(start), _written(stop), _written(step)]}
        case Constant(kind, name):
            return {kind: name}
        case EllipsisType():
            return {"ellipsis": True}
        case _:
            return argument


def _title(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= MAX_NAME or not given.isprintable():
        raise bad_graph(f"name must have 1 to {MAX_NAME} printable characters")
    return given


def _rows(given: Any, width: int, most: int, what: str) -> list[list[Any]]:
    """Return a list of at most ``most`` lists of ``width`` values."""
    rows = cast("list[Any]", given) if isinstance(given, list) else None
    if rows is None or any(not isinstance(row, list) or len(cast("list[Any]", row)) != width for row in rows):
        raise bad_graph(f"{what} must be a list of lists of {width}")
    if len(rows) > most:
        raise bad_graph(f"{what} must be at most {most}, got {len(rows)}")
    return rows


def _word(given: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(given, str) or not pattern.fullmatch(given):
        raise bad_graph(f"{what} must be a short name of letters, digits and underscores, got {str(given)[:100]!r}")
    return given
