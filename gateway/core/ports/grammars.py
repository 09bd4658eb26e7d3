"""What constrains the text that an engine may write."""

from enum import StrEnum
from typing import Protocol


class Constraint(StrEnum):
    """How a constraint is written."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    GRAMMAR = "grammar"  # EBNF


class Grammars(Protocol):
    """Tries constraints out where they can do no harm, by the library that engines are pinned to."""

    async def check(self, kind: Constraint, text: str, *, field: str) -> None:
        """Return when an engine can use ``text``.

        Raises:
            Invalid: ``invalid_grammar``, with the library's reason.
            Unavailable: it cannot be tried out now.
        """
        ...
