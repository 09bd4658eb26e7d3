"""Every operation of every dialect, found in the routers themselves, and where each names something by id.

A dialect that is added later is here at once; what it asks of a caller is read from its routes. A parameter whose name
is in neither ``IDS`` nor ``PLAIN`` is unknown, and the matrix refuses to run over it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Mount, Route

from gateway.core.principals import Scope
from gateway.wire.deps import Needs
from tests.tenancy.operations import Operation, Slot
from tests.tenancy.requests import BODIES, IDS, PATH_IDS, PLAIN, SIGNED, Raw
from tests.tenancy.signed import signed_operations

DOCUMENTS = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
OPEN = frozenset(
    {
        "GET /livez",
        "GET /readyz",
        "GET /metrics",
        "POST /sagemaker",  # the way to the mount for those who leave out its slash
        *(f"GET {mount}{page}" for mount in ("/training/v1", "/v1") for page in DOCUMENTS),
        *(  # the link is signed
            f"{method} {mount}/downloads/{{project_id}}/{{version_id}}/{{file:path}}"
            for mount in ("/training/v1", "/tinker/api/v1")
            for method in ("GET", "HEAD")
        ),
    }
)
"""What needs no key."""


def mounts(app: FastAPI) -> Sequence[str]:
    return [route.path for route in app.routes if isinstance(route, Mount)]


def open_routes(app: FastAPI) -> set[str]:
    """Return the routes that the matrix would not see: those that are not of an ``APIRoute``."""
    found: set[str] = set()
    for prefix, route in _routes(app):
        if isinstance(route, Route) and not isinstance(route, APIRoute):
            found |= {f"{method} {prefix}{route.path}" for method in route.methods or () if method != "HEAD"}
    return found


def operations(app: FastAPI) -> list[Operation]:
    """Return every operation behind a key, in the order of the routers."""
    found: list[Operation] = []
    for prefix, route in _routes(app):
        if isinstance(route, APIRoute) and prefix == SIGNED:
            found += signed_operations(route, tuple(dict.fromkeys(_needs(route.dependant))))
        elif isinstance(route, APIRoute):
            found += [_operation(prefix, method, route) for method in sorted(route.methods)]
    return [operation for operation in found if operation.name not in OPEN]


def _routes(app: FastAPI) -> Iterator[tuple[str, Any]]:
    for route in app.routes:
        if isinstance(route, Mount):
            for inner in route.routes:
                yield route.path, inner
        else:
            yield "", route


def _operation(mount: str, method: str, route: APIRoute) -> Operation:
    flat = get_flat_dependant(route.dependant)
    names = [("path", parameter.name) for parameter in flat.path_params]
    for parameter in flat.query_params:
        names += [("query", name) for name in _texts(parameter.name, parameter.field_info.annotation)]
    required: list[str] = []
    for parameter in flat.body_params:
        model = parameter.field_info.annotation
        names += [("body", name) for name in _texts(parameter.name, model)]
        if _is_model(model):
            required += [name for name, field in model.model_fields.items() if field.is_required()]
    body = BODIES.get((mount, method, route.path))
    if isinstance(body, Raw):
        names += [("body", name) for name in body.ids]
    slots: list[Slot] = []
    unknown: list[str] = []
    for where, name in dict.fromkeys(names):
        kinds = PATH_IDS.get((mount, route.path, name), IDS.get((mount, name)))
        if kinds:
            slots.append(Slot(where=where, name=name, kinds=kinds))
        elif kinds is None and name not in PLAIN:
            unknown.append(f"{where} {name}")
    return Operation(
        mount=mount,
        method=method,
        path=route.path,
        needs=tuple(dict.fromkeys(_needs(route.dependant))),
        slots=tuple(slots),
        unknown=tuple(unknown),
        required=tuple(required),
    )


def _needs(dependant: Dependant) -> Iterator[tuple[Scope, ...]]:
    if isinstance(dependant.call, Needs) and dependant.call.scopes:
        yield dependant.call.scopes
    for inner in dependant.dependencies:
        yield from _needs(inner)


def _texts(name: str, annotation: Any) -> Iterator[str]:
    """Yield the names of what can hold text: only that can be an id."""
    if _is_model(annotation):
        for inner, field in annotation.model_fields.items():
            yield from _texts(inner, field.annotation)
    elif annotation is str:
        yield name
    else:
        for part in get_args(annotation):
            yield from _texts(name, part)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
