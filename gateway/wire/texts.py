"""Texts that must match a pattern, refused in words instead of the pattern."""

import re
from collections.abc import Callable

from pydantic import AfterValidator, WithJsonSchema


def matching(pattern: str, rule: str) -> tuple[AfterValidator, WithJsonSchema]:
    """Return what a text's annotation needs (``Annotated[str, *matching(...)]``); ``rule`` goes on after "must be"."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise ValueError(f"must be {rule}")
        return value

    validate: Callable[[str], str] = check
    return AfterValidator(validate), WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$"})
