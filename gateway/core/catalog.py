"""The catalogue: which base models exist, where their weights are, which engines serve them and with what limits.

Read from a TOML file once at start. One ``[models.NAME]`` table per base model::

    [models.smollm2-135m-instruct]
    path = "/var/lib/loopline/models/smollm2-135m-instruct"
    dtype = "bfloat16"
    vocab_size = 49152
    context_length = 2048
    max_lora_rank = 32
    max_loras = 4
    engines = ["http://127.0.0.1:8101"]
    tool_parser = "hermes"  # optional: how this model writes calls of tools, in the engine's words
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.core.errors import NotFound

ENGINE_DTYPES = ("bfloat16", "float16", "float32")  # those the canary has tolerances for


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """One base model. ``context_length`` counts prompt plus generated tokens; ``dtype`` is the engine's."""

    name: str
    path: Path
    dtype: str
    vocab_size: int
    context_length: int
    max_lora_rank: int
    max_loras: int
    engines: tuple[str, ...]
    tool_parser: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All base models by name."""

    models: Mapping[str, BaseModel]

    def get(self, name: str) -> BaseModel:
        """Return the base model called ``name``.

        Raises:
            NotFound: ``unknown_base_model``; the message lists the names there are.
        """
        if name not in self.models:
            known = ", ".join(sorted(self.models)) or "none"
            raise NotFound(
                f"no base model {name[:200]!r}; available: {known}", code="unknown_base_model", field="base_model"
            )
        return self.models[name]


class CatalogError(ValueError):
    """The catalogue file is wrong; the message says where."""


def parse_catalog(text: str) -> Catalog:
    """Read a catalogue.

    Raises:
        CatalogError: not TOML, an unknown or missing entry, or a value of the wrong type.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"catalogue is not TOML: {error}") from None
    if unknown := set(document) - {"models"}:
        raise CatalogError(f"unknown top-level entries: {', '.join(sorted(unknown))}")
    tables = document.get("models", {})
    return Catalog(models={name: _base_model(name, table) for name, table in tables.items()})


_FIELDS: Mapping[str, type] = {
    "path": str,
    "dtype": str,
    "vocab_size": int,
    "context_length": int,
    "max_lora_rank": int,
    "max_loras": int,
    "engines": list,
}
_OPTIONAL: Mapping[str, type] = {"tool_parser": str}


def _base_model(name: str, table: Any) -> BaseModel:
    where = f"models.{name}"
    if not isinstance(table, dict):
        raise CatalogError(f"{where} must be a table")
    entries: dict[str, Any] = dict(table)  # pyright: ignore[reportUnknownArgumentType]
    if wrong := (set(entries) - set(_OPTIONAL)) ^ set(_FIELDS):
        raise CatalogError(f"{where}: unknown or missing entries: {', '.join(sorted(wrong))}")
    for field, kind in {**_FIELDS, **{name: _OPTIONAL[name] for name in _OPTIONAL.keys() & entries}}.items():
        if not isinstance(entries[field], kind) or isinstance(entries[field], bool):
            raise CatalogError(f"{where}.{field} must be {kind.__name__}")
    if not all(isinstance(url, str) for url in entries["engines"]):
        raise CatalogError(f"{where}.engines must be a list of URLs")
    if entries["dtype"] not in ENGINE_DTYPES:
        raise CatalogError(f"{where}.dtype must be one of {', '.join(ENGINE_DTYPES)}, got {entries['dtype'][:40]!r}")
    return BaseModel(
        name=name,
        path=Path(entries["path"]),
        dtype=entries["dtype"],
        vocab_size=entries["vocab_size"],
        context_length=entries["context_length"],
        max_lora_rank=entries["max_lora_rank"],
        max_loras=entries["max_loras"],
        engines=tuple(entries["engines"]),
        tool_parser=entries.get("tool_parser"),
    )
