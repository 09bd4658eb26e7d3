"""Results of training operations in this dialect's words.

The SDK splits large batches and merges the metrics of the parts: it adds up ``global_token_num``, takes the last
``grad_norm``, and averages everything else by datums. So what is a sum in the core is told as the mean over datums, and
what cannot be averaged (a mean over tokens, a maximum) is told only where it is exact: of an optimizer step.
"""

from collections.abc import Mapping
from typing import assert_never

from gateway.core.addresses import arn
from gateway.core.operations import Operation, Status
from gateway.core.payloads import OperationKind
from gateway.core.ports import UnitOfWork
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, SaveResult
from gateway.core.usage import Meter
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.tensors import tensor_document

MEMBERS: Mapping[OperationKind, str] = {
    OperationKind.FORWARD: "forward",
    OperationKind.FORWARD_BACKWARD: "forwardBackward",
    OperationKind.OPTIM_STEP: "optimizerStep",
    OperationKind.SAVE_WEIGHTS: "saveWeights",
    OperationKind.SAVE_STATE: "saveState",
    OperationKind.LOAD_STATE: "loadState",
}
_STATUS: Mapping[Status, str] = {
    Status.QUEUED: "Pending",
    Status.RUNNING: "InProgress",
    Status.COMPLETED: "Completed",
    Status.FAILED: "Failed",
    Status.SKIPPED: "Skipped",
    Status.CANCELLED: "Failed",
}
_UNRUN: Mapping[Status, str] = {
    Status.SKIPPED: "the session stopped or failed before this operation ran",
    Status.CANCELLED: "this operation was refused when it was submitted",
}
_TOKENS = "tokens:sum"


async def result_of(unit: UnitOfWork, operation: Operation) -> Document:
    """Return the answer to a poll."""
    status = _STATUS[operation.status]
    match operation.outcome:
        case None:
            return {"status": status, "errorDetails": _UNRUN.get(operation.status)}
        case Failure() as failure:
            return {"status": status, "errorDetails": f"{failure.message} ({failure.code})"}
        case ForwardResult() as result:
            facts = await unit.usage.of_source(operation.id)
            trained = sum(fact.quantity for fact in facts if fact.meter is Meter.TRAIN)
            usage = {"trainingTokens": trained}
            return _completed(operation, {**_forwarded(result), "tokenUsage": usage}, usage)
        case OptimStepResult() as result:
            metrics = {name.partition(":")[0]: value for name, value in result.metrics.items()}
            return _completed(operation, {"metrics": metrics})
        case SaveResult() as result:
            version = await unit.versions.get(operation.project_id, result.version_id)
            return _completed(operation, {"modelPackageArn": arn(version)})
        case LoadStateResult():
            return _completed(operation, {})
        case _:
            assert_never(operation.outcome)


def _completed(operation: Operation, result: Document, usage: Document | None = None) -> Document:
    return {
        "status": _STATUS[operation.status],
        "operationResult": {MEMBERS[operation.kind]: result},
        "tokenUsage": usage,
    }


def _forwarded(result: ForwardResult) -> Document:
    outputs = [{name: tensor_document(tensor) for name, tensor in output.items()} for output in result.outputs]
    return {"lossFnOutputType": "float32", "lossFnOutputs": outputs, "metrics": _metrics(result)}


def _metrics(result: ForwardResult) -> Mapping[str, float]:
    datums = len(result.outputs)
    metrics = {
        name.removesuffix(":sum"): value / datums for name, value in result.metrics.items() if name.endswith(":sum")
    }
    metrics["global_token_num"] = result.metrics.get(_TOKENS, 0.0)
    return metrics
