"""The field tables of the OpenAI page. ``python -m tests.architecture.openai_fields`` writes them anew."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.openai.fields import table
from gateway.wire.openai.response_schemas import ResponseCreate
from gateway.wire.openai.schemas import CompletionCreate

PAGE = Path(__file__).parents[2] / "docs" / "clients" / "openai.md"

# Each route's schema, and the fields that OpenAI's own client has for it.
TABLES: Mapping[str, tuple[type[BaseModel], Iterable[str]]] = {
    "chat/completions": (
        ChatCreate,
        [*chat_create_params.CompletionCreateParamsBase.__annotations__, "chat_template"],
    ),
    "completions": (CompletionCreate, completion_create_params.CompletionCreateParamsBase.__annotations__),
    "responses": (ResponseCreate, response_create_params.ResponseCreateParamsBase.__annotations__),
}


def with_tables(page: str) -> str:
    """Return the page with each marked table as the code has it."""
    for route, (schema, known) in TABLES.items():
        rows = "\n".join(table(schema, known))
        marker = f"<!-- fields: {route} -->\n"
        page = re.sub(
            rf"({re.escape(marker)}\n).*?(?=\n\n|\n\Z)", lambda found, rows=rows: found[1] + rows, page, flags=re.S
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
