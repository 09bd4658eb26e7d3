"""Custom losses as this dialect sends them: graphs of ``torch.fx``, node for node, to the core's documents."""

from typing import Any, cast

from fastapi import APIRouter

from gateway.core.clients import Seat, StoredLoss, parse_loss_address
from gateway.core.custom_losses import CustomLoss, bad_graph
from gateway.core.errors import Conflict, NotFound
from gateway.core.ids import ProjectId
from gateway.core.loss_documents import dump_loss, load_loss, read_loss
from gateway.core.ports import UnitOfWork
from gateway.wire.deps import ClockDep, TrainCaller, Writing
from gateway.wire.tinker.loss_schemas import CreateLossAsked, LossNode
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.schemas import Future
from gateway.wire.tinker.translate import find_client

_SPACES = ("torch.nn.functional.", "torch.functional.", "torch._C._nn.", "torch.")
_RENAMED = {"torch.log_sigmoid": "torch.logsigmoid"}
_SAY_NOTHING = {"_stacklevel": None, "inplace": False, "size_average": None, "reduce": None, "dtype": None}
"""Options that torch itself writes into a graph; but for the first they say nothing at these values."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_custom_loss")
async def create_custom_loss(body: CreateLossAsked, principal: TrainCaller, clock: ClockDep, unit: Writing) -> Future:
    """Check a loss and keep it. The same number of the same program names the same loss."""
    loss = read_loss(document_of(body))
    client = await find_client(unit, principal.project_id, body.session_id)
    client.require_running()
    seat = Seat(client_id=client.id, number=body.custom_loss_seq_id)
    digest = await unit.blobs.accept(principal.project_id, dump_loss(loss))
    stored = await unit.clients.add_loss(
        StoredLoss(seat=seat, project_id=principal.project_id, document_digest=digest, created_at=clock.now())
    )
    if stored.document_digest != digest:
        raise Conflict(
            f"{seat.loss_address} was made by another request", code="sequence_reused", field="custom_loss_seq_id"
        )
    return Future(request_id=seat.loss_address)


async def find_loss(unit: UnitOfWork, project_id: ProjectId, loss_id: str) -> StoredLoss:
    """Return the loss called ``loss_id``.

    Raises:
        NotFound: ``custom_loss_not_found``.
    """
    seat = parse_loss_address(loss_id)
    if seat is None:
        raise NotFound("no such custom loss", code="custom_loss_not_found", field="loss_id")
    return await unit.clients.loss(project_id, seat)


async def read_stored(unit: UnitOfWork, project_id: ProjectId, loss_id: str) -> CustomLoss:
    """Return the loss called ``loss_id`` itself. Raises NotFound."""
    stored = await find_loss(unit, project_id, loss_id)
    return load_loss(await unit.blobs.get(project_id, stored.document_digest))


def document_of(body: CreateLossAsked) -> dict[str, Any]:
    """Translate a graph: its placeholders are the inputs, its output names the loss and the metrics.

    Raises:
        Invalid: ``bad_loss_graph``: a graph without these, or with a node that calls nothing.
    """
    nodes = list(body.graph.nodes)
    inputs: list[list[Any]] = []
    while nodes and nodes[0].op == "placeholder":
        inputs.append([nodes[0].target, None, nodes.pop(0).name])
    if [name for name, _, _ in inputs] != [given.name for given in body.inputs]:
        raise bad_graph("the graph must begin with one placeholder for each input, in their order")
    if not nodes or nodes[-1].op != "output":
        raise bad_graph("the graph must end with its output")
    loss, metrics = _output(nodes.pop())
    return {
        "name": body.name,
        "inputs": [[name, given.rank, node] for (name, _, node), given in zip(inputs, body.inputs, strict=True)],
        "nodes": [_node(node) for node in nodes],
        "loss": loss,
        "metrics": metrics,
    }


def _node(node: LossNode) -> list[Any]:
    match node.op:
        case "call_method":
            operation = f"Tensor.{node.target}"
        case "call_function":
            operation = _function(node.target)
        case _:
            raise bad_graph(f"{node.op} is no call of an operation", node.name)
    options = {name: value for name, value in node.kwargs.items() if not _says_nothing(name, value)}
    return [node.name, operation, node.args, options]


def _function(target: str) -> str:
    """Return the core's name of a function: torch keeps one function in several places."""
    space = next((space for space in _SPACES if target.startswith(space)), None)
    name = target if space is None else f"torch.{target.removeprefix(space)}"
    return _RENAMED.get(name, name)


def _says_nothing(name: str, value: Any) -> bool:
    return name in _SAY_NOTHING and (name == "_stacklevel" or value is _SAY_NOTHING[name])


def _output(node: LossNode) -> tuple[str, list[list[str]]]:
    """Return which nodes are the loss and the metrics."""
    match node.args:
        case [{"tuple": [loss, {"dict": metrics}]}] | [[loss, {"dict": metrics}]] if isinstance(metrics, dict):
            named = cast("dict[str, Any]", metrics)
            return _referred(node, loss), [[name, _referred(node, value)] for name, value in named.items()]
        case _:
            raise bad_graph("a loss must return (loss, metrics): a tensor, and a dict of tensors", node.name)


def _referred(node: LossNode, value: Any) -> str:
    match cast("object", value):
        case {"ref": str(name)}:
            return name
        case _:
            raise bad_graph(f"loss and metrics must be tensors, got {str(value)[:60]}", node.name)
