"""The operations of the SageMaker dialect: found in its routes and its table of handlers, their shapes in botocore's
models.

An operation whose ``operationConfig`` is one of several is several here. A member whose name is in neither ``IDS`` nor
``PLAIN`` is unknown, and the matrix refuses to run over it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi.routing import APIRoute

from gateway.core.principals import Scope
from gateway.wire.sagemaker.control import HANDLERS, MEDIA_TYPE
from gateway.wire.sagemaker.models import CONTROL, RUNTIME, Shape, service
from gateway.wire.sagemaker.models import Operation as Model
from tests.tenancy.operations import Operation, Slot
from tests.tenancy.requests import SIGNED, TURNS
from tests.tenancy.world import SIGNED_SESSIONS, World
from tests.wire.sagemaker_clients import HUB_ARN, OUTPUT, ROLE, wire_datum

IDS: Mapping[str, tuple[str, ...]] = {
    "trainingSessionName": SIGNED_SESSIONS,
    "TrainingSessionName": SIGNED_SESSIONS,
    "ModelPackageGroupArn": ("group_arn",),
    "ModelPackageGroupName": ("group",),
    "ModelPackageName": ("signed_package", "adapter_arn", "state_arn"),
    "modelPackageArn": ("adapter_arn", "signed_package", "state_arn"),
    "operationId": ("signed_operation", "operation", "signed_sample"),
}
"""Which members are ids, of what. The first kind is what a well-formed request has."""

OWN_IDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("CreateTrainingSession", "TrainingSessionName"): (),  # a name to take, not a thing
    ("CreateModelPackageGroup", "ModelPackageGroupName"): (),
    ("DeleteTrainingSession", "TrainingSessionName"): ("signed_ended", *SIGNED_SESSIONS),
    ("GetSamplingOperationResult", "operationId"): ("signed_sample", "sample", "operation"),
    ("ListModelPackages", "NextToken"): ("adapter_id",),
    ("ListTrainingSessions", "NextToken"): ("session",),
    ("ExecuteTrainingOperation loadState", "modelPackageArn"): ("signed_package", "state_arn", "adapter_arn"),
}

PLAIN = frozenset(
    {
        "BaseModelArn",  # of the catalogue
        "HubContentName",
        "HubContentVersion",
        "HubName",
        "Key",
        "KmsKeyArn",
        "MaxSchemaVersion",
        "ModelPackageGroupDescription",
        "NameContains",
        "NextToken",  # of the catalogue
        "Path",
        "RoleArn",
        "SecurityGroupIds",
        "Subnets",
        "Value",
        "accept",
        "body",
        "clientToken",
        "contentType",
        "data",
        "description",
        "dtype",
        "lossFnConfig",
        "stop",
    }
)
"""Members that hold no id of ours."""

_TOKENS = {"chunks": [{"tokens": [97], "type": "encoded_text"}]}
_BATCH = {"lossFnName": "cross_entropy", "datumList": [wire_datum([97, 98])]}
_CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()

BODIES: Mapping[str, Mapping[str, Any]] = {
    "CreateTrainingSession": {
        "LoraConfig": {"Rank": 8, "Alpha": 16},
        "RoleArn": ROLE,
        "ModelConfig": {"BaseModelArn": HUB_ARN},
        "OutputConfig": {"S3Location": {"Path": OUTPUT}},
        "TrainingSessionName": TURNS,
    },
    "CreateModelPackageGroup": {"ModelPackageGroupName": TURNS},
    "ListHubContents": {"HubName": "SageMakerPublicHub", "HubContentType": "Model"},
    "DescribeHubContent": {"HubName": "SageMakerPublicHub", "HubContentType": "Model", "HubContentName": "scripted"},
    "ExecuteTrainingOperation forward": _BATCH,
    "ExecuteTrainingOperation forwardBackward": _BATCH,
    "ExecuteTrainingOperation optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}},
    "ExecuteTrainingOperation loadState": {"loadOptimizer": True},
    "ExecuteSamplingOperation sample": {"prompt": _TOKENS, "numSamples": 1, "samplingParams": {"maxTokens": 512}},
    "ExecuteSamplingOperation computeLogprobs": {"prompt": _TOKENS},
    "SampleTrainingSession": {"body": _CHAT},
    "SampleTrainingSessionWithResponseStream": {"body": _CHAT},
}
"""What a request needs beside ids; of a union, what its member needs. TURNS: a name that no request had before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedOperation(Operation):
    """An operation of ``model``; of its ``operationConfig`` the one ``member``. The control plane's have a target."""

    model: Model
    member: str | None
    target: str | None

    @property
    def kind(self) -> str:
        return f"{self.model.name} {self.member}" if self.member else self.model.name

    @property
    def name(self) -> str:
        return f"{self.method} {self.mount}{self.path} {self.kind}"

    @property
    def ends(self) -> bool:
        return self.model.name.startswith(("Stop", "Delete"))

    @property
    def unauthenticated(self) -> int:
        return 403 if self.target is None else 400

    @property
    def forbidden(self) -> int:
        return self.unauthenticated

    def draft(self, origin: str, world: World, *, but: Mapping[Slot, str] | None = None) -> httpx.Request:
        document = self._document()
        chosen = {slot.name: world[slot.kinds[0]] for slot in self.slots if slot.name in self.required}
        for name, value in {**chosen, **{slot.name: value for slot, value in (but or {}).items()}}.items():
            _put(document, name.split("."), value)
        path, headers, shape = self.path, {"Content-Type": "application/json"}, self.model.request
        for member, (place, wire_name) in shape.locations.items():
            value = document.pop(member, None)
            if place == "uri":
                path = path.replace(f"{{{wire_name}}}", str(value))
            elif value is not None:
                headers[wire_name] = str(value)
        if self.target is not None:
            headers |= {"Content-Type": MEDIA_TYPE, "X-Amz-Target": self.target}
        content = document.get(shape.payload, b"") if shape.payload else json.dumps(document).encode()
        return httpx.Request(
            self.method,
            f"{origin}{self.mount}{path}",
            headers=headers,
            content=None if self.method == "GET" else content,
        )

    def _document(self) -> dict[str, Any]:
        fresh = f"fresh-{next(TURNS)}"
        body = {name: fresh if value is TURNS else value for name, value in BODIES.get(self.kind, {}).items()}
        document: dict[str, Any] = body if self.member is None else {"operationConfig": {self.member: body}}
        if "sequenceNumber" in self.model.request.required:
            document["sequenceNumber"] = next(TURNS)
        return document


def signed_operations(route: APIRoute, needs: tuple[tuple[Scope, ...], ...]) -> Iterator[Operation]:
    """Yield the operations that a route of the dialect takes."""
    if route.name not in service(RUNTIME).operations:
        for name, (_, scope) in HANDLERS.items():
            model = service(CONTROL).operation(name)
            yield _operation(route, model, () if scope is None else ((scope,),), target=f"SageMaker.{name}")
        return
    model = service(RUNTIME).operation(route.name)
    config = model.request.members.get("operationConfig")
    for member in (None,) if config is None else config.members:
        yield _operation(route, model, needs, member=member)


def _operation(
    route: APIRoute,
    model: Model,
    needs: tuple[tuple[Scope, ...], ...],
    *,
    target: str | None = None,
    member: str | None = None,
) -> SignedOperation:
    slots: list[Slot] = []
    unknown: list[str] = []
    required: list[str] = []
    kind = f"{model.name} {member}" if member else model.name
    for path, needed in _texts(model.request, "", needed=True):
        if path.startswith("operationConfig.") and path.split(".")[1] != member:
            continue
        name = path.rpartition(".")[2]
        kinds = OWN_IDS.get((kind, name), IDS.get(name))
        if kinds:
            slots.append(Slot(where="signed", name=path, kinds=kinds))
            required += [path] if needed else []
        elif kinds is None and name not in PLAIN:
            unknown.append(path)
    return SignedOperation(
        mount=SIGNED,
        method=model.method,
        path=route.path,
        needs=needs,
        slots=tuple(slots),
        unknown=tuple(unknown),
        required=tuple(required),
        model=model,
        member=member,
        target=target,
    )


def _texts(shape: Shape, path: str, *, needed: bool) -> Iterator[tuple[str, bool]]:
    """Yield where a request can hold text that is not one of an enumeration, and whether it must."""
    match shape.kind:
        case "structure":
            for name, inner in shape.members.items():
                still = needed and (shape.is_union or name in shape.required)
                yield from _texts(inner, f"{path}.{name}" if path else name, needed=still)
        case "list" | "map":
            yield from _texts(shape.item, path, needed=False)
        case "string" | "document" | "blob" if not shape.choices:
            yield path, needed
        case _:
            return


def _put(document: dict[str, Any], path: list[str], value: str) -> None:
    for name in path[:-1]:
        document[name] = dict(document.get(name, {}))
        document = document[name]
    document[path[-1]] = value
