"""Every operation of every dialect, found in the routers themselves, and where each names something by id.

A dialect that is added later is here at once; what it asks of a caller is read from its routes. A parameter whose name
is in neither ``IDS`` nor ``PLAIN`` is unknown, and the matrix refuses to run over it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import httpx
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Mount, Route

from gateway.core.principals import Scope
from gateway.wire.deps import Needs
from tests.tenancy.requests import BODIES, IDS, PATH_IDS, PLAIN, QUERIES, SAMPLES, TURNS, Raw
from tests.tenancy.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where an operation names something: a part of the path, a query parameter or a field of the body."""

    where: str
    name: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. Its caller needs one of each group of ``needs``."""

    mount: str
    method: str
    path: str
    needs: tuple[tuple[Scope, ...], ...]
    slots: tuple[Slot, ...]
    unknown: tuple[str, ...]  # names that nobody has classified
    required: tuple[str, ...]  # fields that its body must have

    @property
    def name(self) -> str:
        return f"{self.method} {self.mount}{self.path}"

    def admits(self, scope: Scope) -> bool:
        return all({scope} & {*group, Scope.ADMIN} for group in self.needs)

    def request(
        self, origin: str, world: World, key: str | None, *, but: Mapping[Slot, str] | None = None
    ) -> httpx.Request:
        """Return a well-formed request about the things of ``world``; ``but`` puts other ids in some slots."""
        chosen = {(slot.where, slot.name): world[slot.kinds[0]] for slot in self.slots if self._named(slot)}
        chosen |= {(slot.where, slot.name): value for slot, value in (but or {}).items()}
        path = self.path
        for part in self.path.split("{")[1:]:
            name = part.partition("}")[0]
            plain = name.removesuffix(":path")
            path = path.replace(f"{{{name}}}", chosen.get(("path", plain)) or SAMPLES[plain])
        query = dict(QUERIES.get((self.mount, self.path), {}))
        query |= {name: value for (where, name), value in chosen.items() if where == "query"}
        headers = {} if key is None else DIALECTS[self.mount](key)
        ids = {name: value for (where, name), value in chosen.items() if where == "body"}
        content: dict[str, Any] = {}
        if isinstance(self._body, Raw):
            headers["Content-Type"] = self._body.media_type
            content = {"content": self._body.content(ids)}
        elif self.method in ("POST", "PUT", "PATCH"):
            left = [name for name in self.required if name not in {*self._body, *ids}]
            content = {"json": {**{name: SAMPLES[name] for name in left}, **self._fresh_body(), **ids}}
        return httpx.Request(self.method, f"{origin}{self.mount}{path}", params=query, headers=headers, **content)

    def _named(self, slot: Slot) -> bool:
        """A request must fill its path and what its body requires; other ids are optional."""
        needed = isinstance(self._body, Raw) or slot.name in {*self.required, *self._body}
        return slot.where == "path" or (slot.where == "body" and needed)

    def _fresh_body(self) -> dict[str, Any]:
        assert not isinstance(self._body, Raw)
        return {name: next(TURNS) if value is TURNS else value for name, value in self._body.items()}

    @property
    def _body(self) -> "Mapping[str, Any] | Raw":
        return BODIES.get((self.mount, self.method, self.path), {})


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _x_api_key(key: str) -> dict[str, str]:
    return {"X-API-Key": key}


DIALECTS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "/training/v1": _bearer,
    "/v1": _bearer,
    "/tinker": _x_api_key,
}
"""How each dialect's requests carry a key."""

SIGNED = "/sagemaker"
"""A dialect whose operations come from botocore's models and whose requests are signed, body and all, has a matrix of
its own: tests/wire/test_sagemaker_refusals.py."""

DOCUMENTS = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
OPEN = frozenset(
    {
        "GET /livez",
        "GET /readyz",
        "GET /metrics",
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
    return [route.path for route in app.routes if isinstance(route, Mount) and route.path != SIGNED]


def open_routes(app: FastAPI) -> set[str]:
    """Return the routes that the matrix would not see: those that are not of an ``APIRoute``."""
    found: set[str] = set()
    for prefix, route in _routes(app):
        if isinstance(route, Route) and not isinstance(route, APIRoute):
            found |= {f"{method} {prefix}{route.path}" for method in route.methods or () if method != "HEAD"}
    return found


def operations(app: FastAPI) -> list[Operation]:
    """Return every operation behind a key, in the order of the routers."""
    found = [
        _operation(prefix, method, route)
        for prefix, route in _routes(app)
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    return [operation for operation in found if operation.name not in OPEN]


def _routes(app: FastAPI) -> Iterator[tuple[str, Any]]:
    for route in app.routes:
        if getattr(route, "path", None) == SIGNED:
            continue
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
    if isinstance(dependant.call, Needs):
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
