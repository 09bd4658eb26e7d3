"""Each operation's OpenAPI document: FastAPI's own, and where that is silent one made from what the dialect reads by:
botocore's shapes for SageMaker, the messages of ``wire.proto`` for Tinker's batches."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from starlette.routing import Mount

from gateway.wire.sagemaker.models import Document
from gateway.wire.tinker import wire_pb2 as pb
from tests.tenancy.operations import Operation
from tests.tenancy.requests import OPENAI, TINKER
from tests.tenancy.signed import SignedOperation

_MESSAGES: Mapping[tuple[str, str], Descriptor] = {
    (TINKER, "/api/v1/forward_backward"): pb.ForwardBackwardRequest.DESCRIPTOR
}
_REFERENCE = "#/components/schemas/"


def documents(app: FastAPI, every: list[Operation]) -> Iterator[tuple[Operation, dict[str, Any]]]:
    """Yield every operation with a document that describes it alone."""
    own = {route.path: route.app.openapi() for route in app.routes if isinstance(route, Mount) and _is_fastapi(route)}
    chat = own[OPENAI]["paths"]["/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for operation in every:
        if isinstance(operation, SignedOperation):
            details, schemas = _signed(operation, chat)
            schemas |= own[OPENAI]["components"]["schemas"]
        else:
            path = operation.path.replace(":path}", "}")
            details, schemas = own[operation.mount]["paths"][path][operation.method.lower()], {}
            schemas |= own[operation.mount]["components"]["schemas"]
            if message := _MESSAGES.get((operation.mount, operation.path)):
                schemas |= _messages(message)
                details = {**details, "requestBody": _body(_reference(message.name))}
        yield (
            operation,
            {
                "openapi": "3.1.0",
                "info": {"title": operation.name, "version": "1"},
                "paths": {operation.path.replace(":path}", "}"): {operation.method.lower(): details}},
                "components": {"schemas": schemas},
            },
        )


def _is_fastapi(route: Mount) -> bool:
    return isinstance(route.app, FastAPI)


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"{_REFERENCE}{name}"}


def _body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body in JSON; who sends it may write it otherwise."""
    return {"required": True, "content": {"application/json": {"schema": schema}}}


# SageMaker


def _signed(operation: SignedOperation, chat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an operation's details and the shapes that they refer to. A payload is a chat completion's request."""
    model = operation.model
    shapes = model.request.service.document["shapes"]
    request = model.request
    parameters: list[dict[str, Any]] = []
    members: dict[str, Any] = {}
    for name, member in request.facts.get("members", {}).items():
        place = {"uri": "path"}.get(member.get("location"), member.get("location"))
        if place:
            described = {"in": place, "name": member["locationName"], "schema": _reference(member["shape"])}
            parameters.append({**described, "required": place == "path" or name in request.required})
        else:
            members[name] = _reference(member["shape"])
    if operation.member is not None:
        config = request.members["operationConfig"].facts["members"][operation.member]
        members["operationConfig"] = _structure({operation.member: _reference(config["shape"])}, [operation.member])
    details: dict[str, Any] = {"parameters": parameters, "responses": {"200": {"description": "answered"}}}
    if operation.method != "GET":
        left = [name for name in request.required if name in members]
        schema = chat if request.payload else _structure(members, left)
        details["requestBody"] = _body(schema)
    return details, _reached(shapes, [*parameters, *members.values()])


def _reached(shapes: Mapping[str, Document], roots: Any) -> dict[str, Any]:
    """Return the schemas of the shapes that ``roots`` refer to, and of those that these refer to."""
    found: dict[str, Any] = {}
    left = list(_references(roots))
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _shape(shapes[name])
            left += _references(found[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(_REFERENCE)
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)


def _shape(facts: Document) -> dict[str, Any]:
    if facts.get("document"):
        return {}
    span = {limit: facts[limit] for limit in ("min", "max") if limit in facts}
    match facts["type"]:
        case "structure":
            members = {name: _reference(member["shape"]) for name, member in facts["members"].items()}
            one = {"minProperties": 1, "maxProperties": 1} if facts.get("union") else {}
            return {**_structure(members, list(facts.get("required", ()))), **one}
        case "list":
            return {"type": "array", "items": _reference(facts["member"]["shape"]), **_renamed(span, "Items")}
        case "map":
            inner = _reference(facts["value"]["shape"])
            return {"type": "object", "additionalProperties": inner, **_renamed(span, "Properties")}
        case "string" if "enum" in facts:
            return {"type": "string", "enum": facts["enum"]}
        case "string":
            pattern = facts.get("pattern")
            fits = {} if pattern is None or "\\p{" in pattern else {"pattern": f"^(?:{pattern})$"}
            return {"type": "string", **fits, **_renamed(span, "Length")}
        case "blob":
            return {"type": "string", "format": "byte"}
        case "boolean":
            return {"type": "boolean"}
        case "integer" | "long":
            return {"type": "integer", **_renamed(span, "imum")}
        case _:
            return {"type": "number", **_renamed(span, "imum")}


def _renamed(span: Mapping[str, Any], of: str) -> dict[str, Any]:
    return {f"{limit}{of}": value for limit, value in span.items()}


def _structure(members: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


# Protobuf, in its JSON form


def _messages(root: Descriptor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    left = [root]
    while left:
        message = left.pop()
        if message.name not in found:
            found[message.name] = _message(message)
            left += [field.message_type for field in message.fields if field.message_type is not None]
    return found


def _message(message: Descriptor) -> dict[str, Any]:
    plain = {field.name: _field(field) for field in message.fields if field.containing_oneof is None}
    choices = [
        {**plain, field.name: _field(field)} for field in message.fields if field.containing_oneof is not None
    ] or [plain]
    return {"anyOf": [_structure(members, []) for members in choices]}


def _field(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(field.message_type.fields_by_name["value"])}
    return {"type": "array", "items": _value(field)} if field.is_repeated else _value(field)


def _value(field: FieldDescriptor) -> dict[str, Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _reference(field.message_type.name)
        case FieldDescriptor.CPPTYPE_ENUM:
            return {"enum": [value.name for value in field.enum_type.values]}
        case FieldDescriptor.CPPTYPE_BOOL:
            return {"type": "boolean"}
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return {"type": "number"}
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return {"type": "string", "pattern": "^(?:[A-Za-z0-9+/]{4}){0,8}$"}
        case FieldDescriptor.CPPTYPE_STRING:
            return {"type": "string"}
        case _:
            bits = 31 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 63
            return {"type": "integer", "minimum": -(2**bits), "maximum": 2**bits - 1}
