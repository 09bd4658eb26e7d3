"""botocore's models of the two services: which operations there are, where they lie, and what their shapes hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from botocore.loaders import Loader

CONTROL = "sagemaker"
RUNTIME = "sagemakertrainingsessionruntime"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A shape and the service whose model it stands in. Shapes may contain themselves, so parts are looked up late."""

    facts: Document = field(repr=False)
    service: "Service" = field(repr=False)

    @property
    def kind(self) -> str:
        """``structure``, ``list``, ``map``, ``string``, ``integer`` and so on; ``document`` is any JSON."""
        return "document" if self.facts.get("document") else self.facts["type"]

    @property
    def members(self) -> Mapping[str, "Shape"]:
        """Of a structure."""
        return {name: self.service.shape(member["shape"]) for name, member in self._members.items()}

    @property
    def locations(self) -> Mapping[str, tuple[str, str]]:
        """Where members of a request travel that are not in its body: ``uri`` or ``header``, and under which name."""
        return {
            name: (member["location"], member["locationName"])
            for name, member in self._members.items()
            if "location" in member
        }

    @property
    def payload(self) -> str | None:
        """The member that is the body itself, where one is."""
        return self.facts.get("payload")

    @property
    def required(self) -> Sequence[str]:
        return self.facts.get("required", ())

    @property
    def is_union(self) -> bool:
        """Exactly one of its members is given."""
        return bool(self.facts.get("union"))

    @property
    def item(self) -> "Shape":
        """What a list holds, or a map's values."""
        return self.service.shape(self.facts["member" if self.kind == "list" else "value"]["shape"])

    @property
    def span(self) -> tuple[float, float]:
        """The least and the most: of a number itself, else of its length."""
        return self.facts.get("min", -math.inf), self.facts.get("max", math.inf)

    @property
    def choices(self) -> Sequence[str]:
        """The values that a string may have; none: any."""
        return self.facts.get("enum", ())

    @property
    def pattern(self) -> str | None:
        """What a whole string must match."""
        return self.facts.get("pattern")

    @property
    def _members(self) -> Mapping[str, Document]:
        return self.facts.get("members", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of a service. Without an answer its body is empty."""

    name: str
    method: str
    path: str
    request: Shape
    answer: Shape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service's model."""

    document: Document = field(repr=False)

    @property
    def operations(self) -> Sequence[str]:
        """Their names."""
        return sorted(self.document["operations"])

    def shape(self, name: str) -> Shape:
        return Shape(facts=self.document["shapes"][name], service=self)

    def operation(self, name: str) -> Operation:
        facts = self.document["operations"][name]
        answer = facts.get("output")
        return Operation(
            name=name,
            method=facts["http"]["method"],
            path=facts["http"]["requestUri"],
            request=self.shape(facts["input"]["shape"]),
            answer=None if answer is None else self.shape(answer["shape"]),
        )


@lru_cache
def service(name: str) -> Service:
    """Return botocore's model of ``name``; reading the larger one takes a third of a second."""
    return Service(document=cast("Document", Loader().load_service_model(name, "service-2")))
