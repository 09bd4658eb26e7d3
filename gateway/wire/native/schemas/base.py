"""Requests and responses as this dialect spells them: the rules that all of them follow.

Requests (``*Create``) refuse unknown fields and convert nothing: a number in quotes is not a number. Responses
(``*Read``) have no defaults: every field is always there.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Create(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Read(BaseModel):
    """Base of every response body."""

    model_config = ConfigDict(frozen=True)


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    after: str | None = None
