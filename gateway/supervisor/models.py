"""What the catalogue says of a prepared base model, read from its ``config.json``."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.core.catalog import BaseModel


class ModelProblem(Exception):
    """A base model cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``context_length`` is the most the model itself can take."""

    vocab_size: int
    context_length: int


def read_facts(directory: Path) -> ModelFacts:
    """Read vocabulary size and context length.

    Raises:
        ModelProblem: no readable ``config.json``, or one without these numbers.
    """
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelProblem(f"{directory} holds no base model: there is no config.json in it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelProblem(f"{path} is not JSON: {error}") from None
    text = config.get("text_config", config)  # multimodal models keep the language model's numbers here
    sizes = {name: text.get(name) for name in ("vocab_size", "max_position_embeddings")}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ModelProblem(f"{path} has no usable {name}: {value!r}")
    return ModelFacts(vocab_size=sizes["vocab_size"], context_length=sizes["max_position_embeddings"])


def render_catalog(models: Iterable[BaseModel]) -> str:
    """Return the catalogue file (``gateway.core.catalog``) of ``models``."""
    return "\n".join(_table(model) for model in models)


def _table(model: BaseModel) -> str:
    return "\n".join(
        [
            f"[models.{_quoted(model.name)}]",
            f"path = {_quoted(str(model.path))}",
            f"dtype = {_quoted(model.dtype)}",
            f"vocab_size = {model.vocab_size}",
            f"context_length = {model.context_length}",
            f"max_lora_rank = {model.max_lora_rank}",
            f"max_loras = {model.max_loras}",
            f"engines = {_quoted(list(model.engines))}",
            *([] if model.tool_parser is None else [f"tool_parser = {_quoted(model.tool_parser)}"]),
            "",
        ]
    )


def _quoted(value: str | list[str]) -> str:
    """Return a TOML string or array of strings; JSON's spelling is TOML's, too."""
    return json.dumps(value, ensure_ascii=False)
