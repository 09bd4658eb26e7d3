"""Evaluates custom losses: node by node, operations by their names, with bounds on size and work.

Nothing here depends on time or on what else runs, so a loss that was admitted once is admitted in every replay. Work is
counted in elements: of every result, and ``NODE_ELEMENTS`` for each node on top.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import EllipsisType
from typing import Any, cast

import torch
from torch import Tensor

from gateway.core.custom_losses import Argument, Constant, CustomLoss, Items, Node, Ref, Span, bad_graph
from trainer.out_of_memory import ran_out_of_memory

MAX_ELEMENTS = 1 << 22  # of one result
MAX_DATUM_ELEMENTS = 1 << 24  # of all results of one datum, which are in memory at once
MAX_WORK = 1 << 30  # of one operation: seconds
NODE_ELEMENTS = 1 << 10  # what calling an operation at all counts
_MAX_NUMBER = 1 << 63
_PARTS = ("values", "indices")  # of results such as that of torch.max; a tensor has the other attributes
_PRODUCTS = frozenset({"torch.matmul", "Tensor.matmul", "operator.matmul", "torch.mv", "Tensor.mv"})
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, NotImplementedError, AttributeError)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Of one datum: the loss, 0-d, with its graph; and its metrics by name."""

    loss: Tensor
    metrics: Mapping[str, float]


class Evaluator:
    """Evaluates one loss on the datums of one operation, one after the other, on the CPU."""

    def __init__(self, loss: CustomLoss) -> None:
        self._loss = loss
        self._calls = [(node, _function(node.operation)) for node in loss.nodes]
        self._work = 0

    def evaluate(self, values: Sequence[Tensor]) -> Evaluated:
        """Evaluate the loss on ``values``, one for each of its inputs.

        Raises:
            Invalid: ``bad_loss_graph`` names the node: torch refuses it (shapes that do not fit), its result is too
                large, the work is too much, or the loss or a metric is no finite number.
        """
        env: dict[str, Any] = {each.node: value for each, value in zip(self._loss.inputs, values, strict=True)}
        held = 0
        for node, function in self._calls:
            result = _call(node, function, env)
            size = sum(tensor.numel() for tensor in _tensors([result]))
            held += size
            self._work += NODE_ELEMENTS + size * _depth(node, env)
            if held > MAX_DATUM_ELEMENTS:
                raise bad_graph(f"the results up to here have more than {MAX_DATUM_ELEMENTS} elements", node.name)
            if self._work > MAX_WORK:
                raise bad_graph(
                    f"the loss has computed {MAX_WORK} elements, the most of one operation; send fewer datums at once",
                    node.name,
                )
            env[node.name] = result
        loss = env[self._loss.loss]
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = f"shape {list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise bad_graph(f"the loss must be a 0-dimensional tensor of floats, got {shape}", self._loss.loss)
        self._require_finite(loss, self._loss.loss, env)
        metrics = {name: self._metric(name, node, env) for name, node in self._loss.metrics}
        return Evaluated(loss, metrics)

    def _metric(self, name: str, node: str, env: Mapping[str, Any]) -> float:
        value = env[node]
        if isinstance(value, Tensor) and value.numel() == 1:
            self._require_finite(value, node, env)
            return float(value.detach())
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        raise bad_graph(f"metric {name!r} must be one finite number", node)

    def _require_finite(self, value: Tensor, node: str, env: Mapping[str, Any]) -> None:
        if torch.isfinite(value).all():
            return
        first = next((each.name for each in self._loss.nodes if not _finite(env[each.name])), node)
        raise bad_graph(f"the result is not finite, and so the value of {node!r}", first)


def _call(node: Node, function: Callable[..., Any], env: Mapping[str, Any]) -> Any:
    arguments = [_value(argument, env) for argument in node.arguments]
    options = {name: _value(argument, env) for name, argument in node.options.items()}
    try:
        if function is not _attribute and _most(arguments, options) > MAX_ELEMENTS:
            _require_small(node, function, arguments, options)
        result = function(*arguments, **options)
    except _REFUSALS as error:
        if ran_out_of_memory(error):
            raise
        raise bad_graph(f"{node.operation}: {_first_line(error)}", node.name) from None
    if any(tensor.numel() > MAX_ELEMENTS for tensor in _tensors([result])):
        raise _too_large(node)
    return result


def _require_small(
    node: Node, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Run the call on shapes alone, without elements, and refuse a large result before it exists."""
    with torch.device("meta"), torch.no_grad():
        sketch = function(*[_sketched(each) for each in arguments], **{k: _sketched(v) for k, v in options.items()})
    if any(tensor.numel() > MAX_ELEMENTS for tensor in _tensors([sketch])):
        raise _too_large(node)


def _too_large(node: Node) -> Exception:
    return bad_graph(f"{node.operation} gives more than {MAX_ELEMENTS} elements", node.name)


def _most(arguments: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Return a bound for the elements of a result: no operation gives more than the product of all it is given."""
    bound = 1
    for value in _leaves([*arguments, *options.values()]):
        if isinstance(value, Tensor):
            bound *= 1 + value.numel()
        elif isinstance(value, int):
            bound *= 1 + abs(value)
        elif isinstance(value, float):
            bound *= 1 + math.ceil(abs(value))
    return bound


def _depth(node: Node, env: Mapping[str, Any]) -> int:
    """Return how many products each element of a matrix product sums up; 1 for other operations."""
    first = node.arguments[0] if node.arguments else None
    left = env.get(first.name) if isinstance(first, Ref) else None
    if node.operation not in _PRODUCTS or not isinstance(left, Tensor) or not left.dim():
        return 1
    return max(1, left.shape[-1])


def _value(argument: Argument, env: Mapping[str, Any]) -> Any:
    match argument:
        case Ref(name):
            return env[name]
        case Items(items, fixed):
            values = [_value(each, env) for each in items]
            return tuple(values) if fixed else values
        case Span(start, stop, step):
            return slice(_value(start, env), _value(stop, env), _value(step, env))
        case Constant("device", name):
            return torch.device(name)
        case Constant(_, name):
            return getattr(torch, name)
        case EllipsisType() | None | bool() | int() | float() | str():
            return argument


def _function(operation: str) -> Callable[..., Any]:
    """Return what computes an allowed operation."""
    if operation == "getattr":
        return _attribute
    space, _, name = operation.partition(".")
    match space:
        case "operator":
            return _item if name == "getitem" else _arithmetic(getattr(operator, name))
        case "math":
            return _on_numbers(getattr(math, name))
        case "Tensor":
            return _on_tensor(getattr(Tensor, name))
        case _:
            found = getattr(torch.nn.functional, name, None) or getattr(torch, name)
            return _arange if name == "arange" else found


def _attribute(value: Any, name: str) -> Any:
    """Read one of ``loss_operations.ATTRIBUTES``."""
    if isinstance(value, Tensor) is (name in _PARTS) or not isinstance(value, Tensor | tuple):
        raise TypeError(f"a {type(value).__name__} has no {name}")
    return getattr(cast("Any", value), name)


def _item(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple | list):
        raise TypeError(f"{type(value).__name__} cannot be indexed")
    if isinstance(value, Tensor) and value.is_meta and isinstance(index, Tensor) and index.dtype == torch.bool:
        return value.new_empty((index.numel(), *value.shape[index.dim() :]))  # at most: no elements are known
    return cast("Any", value)[index]


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Python's operators, on tensors and numbers alone; whole numbers stay small."""

    def call(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, Tensor | int | float):
                raise TypeError(f"an operand is a {type(operand).__name__}; tensors and numbers are allowed")
        if function is operator.pow and all(isinstance(each, int) for each in operands):
            base, exponent = operands
            if abs(base) > 1 and abs(exponent) > 63:
                raise OverflowError("the result is too large")
        result = function(*operands)
        if isinstance(result, complex) or (isinstance(result, int) and abs(result) > _MAX_NUMBER):
            raise OverflowError("the result is complex or too large")
        return result

    return call


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        if not all(isinstance(operand, int | float) for operand in operands):
            raise TypeError("functions of math take Python's numbers, such as a length; use torch's on tensors")
        return function(*operands)

    return call


def _on_tensor(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a method of tensors was called on a {type(tensor).__name__}")
        return method(tensor, *arguments, **options)

    return call


def _arange(*bounds: Any, **options: Any) -> Tensor:
    """Whole numbers alone: the length that others give is no product of what is given."""
    numbers = [*bounds, *(options[name] for name in ("start", "end", "step") if name in options)]
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("arange takes whole numbers")
    return torch.arange(*bounds, **options)


def _sketched(value: Any) -> Any:
    match value:
        case Tensor():
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        case torch.device():
            return torch.device("meta")
        case list() | tuple():
            items = [_sketched(each) for each in cast("Sequence[Any]", value)]
            return items if isinstance(value, list) else tuple(items)
        case slice():
            return slice(_sketched(value.start), _sketched(value.stop), _sketched(value.step))
        case _:
            return value


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(cast("Sequence[Any]", value))
        elif isinstance(value, slice):
            yield from _leaves([value.start, value.stop, value.step])
        else:
            yield value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (value for value in _leaves(values) if isinstance(value, Tensor))


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors([value]))


def _first_line(error: BaseException) -> str:
    return str(next(chain(str(error).splitlines(), [type(error).__name__])))[:200]
