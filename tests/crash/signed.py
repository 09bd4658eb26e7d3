"""A plan's operations as the SageMaker dialect spells them, so that a run can go through it."""

from collections.abc import Mapping
from typing import Any

import httpx

from tests.crash.plan import Step

PENDING = ("Pending", "InProgress")
FINAL = {"Completed": "completed", "Failed": "failed", "Skipped": "skipped"}
_ARN = "arn:aws:sagemaker:us-east-1:000000000000:model-package"
_MEMBERS = {
    "forward": "forward",
    "forward_backward": "forwardBackward",
    "optim_step": "optimizerStep",
    "save_weights": "saveWeights",
    "save_state": "saveState",
    "load_state": "loadState",
}
_ADAM = {
    "learning_rate": "learningRate",
    "eps": "eps",
    "weight_decay": "weightDecay",
    "grad_clip_norm": "gradClipNorm",
}
_NATIVE_DEFAULTS = {"beta1": 0.9, "beta2": 0.95}  # this dialect's own differ


def submission(url: str, session: str, step: Step) -> httpx.Request:
    """Return the request that submits ``step``; it is repeated as it is. Its answer names the operation."""
    body = {
        "sequenceNumber": step.seq,
        "clientToken": f"{session}-{step.seq}",
        "operationConfig": {_MEMBERS[step.verb]: _config(step)},
    }
    return httpx.Request("POST", f"{_operations(url, session)}", json=body)


def poll(url: str, session: str, operation: str) -> httpx.Request:
    """Return the request that asks for the result of ``operation``."""
    return httpx.Request("GET", f"{_operations(url, session)}/{operation}")


def acknowledged(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer to a submission as the native dialect would give it, as far as a history needs it."""
    return {"id": answer["operationId"]}


def _operations(url: str, session: str) -> str:
    return f"{url}/sagemaker/v1/training-sessions/{session}/operations"


def _config(step: Step) -> dict[str, Any]:
    match step.verb:
        case "forward" | "forward_backward":
            loss_fn = step.body.get("loss_fn", "cross_entropy")
            return {"lossFnName": loss_fn, "datumList": [_datum(datum) for datum in step.body["data"]]}
        case "optim_step":
            asked = step.body["adam_params"]
            return {"adamParamsConfig": {**_NATIVE_DEFAULTS, **{_ADAM[name]: asked[name] for name in asked}}}
        case "load_state":
            group, _, number = step.body["version"].partition("@")
            return {"modelPackageArn": f"{_ARN}/{group}/{number}", "loadOptimizer": step.body["optimizer"]}
        case _:
            return {}  # a save: this dialect has no lazy ones


def _datum(datum: Mapping[str, Any]) -> dict[str, Any]:
    tokens = datum["model_input"]
    inputs = {"weights": [1.0] * len(tokens), **datum["loss_fn_inputs"]}  # losses of policies want them here
    return {
        "modelInput": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "lossFnInputs": {
            name: {"data": data, "dtype": "int64" if name == "target_tokens" else "float32", "shape": [len(data)]}
            for name, data in inputs.items()
        },
    }
