"""One operation of a dialect as the matrix asks for it, and how each dialect carries a key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.core.principals import Scope
from tests.tenancy.requests import BODIES, NATIVE, OPENAI, QUERIES, SAMPLES, SIGNED, TINKER, TURNS, Raw
from tests.tenancy.world import World
from tests.wire.signing import sign


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

    @property
    def ends(self) -> bool:
        """Whether it takes away what others need."""
        return self.method == "DELETE" or self.path.endswith(("/cancel_future", "/finish"))

    @property
    def unauthenticated(self) -> int:
        """The status for those whom nobody knows."""
        return 401

    @property
    def forbidden(self) -> int:
        """The status for those whose key lacks the scope."""
        return 403

    def admits(self, scope: Scope) -> bool:
        return all({scope} & {*group, Scope.ADMIN} for group in self.needs)

    def request(
        self, origin: str, world: World, key: str | None, *, but: Mapping[Slot, str] | None = None
    ) -> httpx.Request:
        """Return a well-formed request about the things of ``world``; ``but`` puts other ids in some slots."""
        return keyed(self, self.draft(origin, world, but=but), key)

    def draft(self, origin: str, world: World, *, but: Mapping[Slot, str] | None = None) -> httpx.Request:
        """Return such a request without a key."""
        chosen = {(slot.where, slot.name): world[slot.kinds[0]] for slot in self.slots if self._named(slot)}
        chosen |= {(slot.where, slot.name): value for slot, value in (but or {}).items()}
        path = self.path
        for part in self.path.split("{")[1:]:
            name = part.partition("}")[0]
            plain = name.removesuffix(":path")
            path = path.replace(f"{{{name}}}", chosen.get(("path", plain)) or SAMPLES[plain])
        query = dict(QUERIES.get((self.mount, self.path), {}))
        query |= {name: value for (where, name), value in chosen.items() if where == "query"}
        headers: dict[str, str] = {}
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


def _bearer(request: httpx.Request, key: str) -> None:
    request.headers["Authorization"] = f"Bearer {key}"


def _x_api_key(request: httpx.Request, key: str) -> None:
    request.headers["X-API-Key"] = key


DIALECTS: Mapping[str, Callable[[httpx.Request, str], object]] = {
    NATIVE: _bearer,
    OPENAI: _bearer,
    TINKER: _x_api_key,
    SIGNED: sign,
}
"""How each dialect's requests carry a key."""


def keyed(operation: Operation, request: httpx.Request, key: str | None) -> httpx.Request:
    """Return ``request`` with ``key``; it must not be changed afterwards."""
    if key is not None:
        DIALECTS[operation.mount](request, key)
    return request
