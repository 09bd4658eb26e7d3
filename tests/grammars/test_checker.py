"""Constraints are tried out where they can do no harm: in a process of their own, within a time and a memory."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gateway.core.errors import Invalid
from gateway.core.ports import Constraint
from gateway.grammars import child
from gateway.grammars.checker import GrammarChecker

HEAVY = "root ::= " + " ".join('("a" | "b" | "ab" | "ba" | "")' for _ in range(20_000))


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    async with GrammarChecker() as checker:
        yield checker


async def test_a_grammar_that_takes_too_long_is_refused_while_others_are_answered(checker: GrammarChecker) -> None:
    await checker.check(Constraint.REGEX, "a+", field="regex")
    began = time.monotonic()
    heavy = asyncio.create_task(checker.check(Constraint.GRAMMAR, HEAVY, field="grammar"))
    for number in range(5):
        await checker.check(Constraint.REGEX, f"b{{{number + 1}}}", field="regex")
    assert not heavy.done()
    with pytest.raises(Invalid, match="takes more than 2 s or 512 MiB") as refused:
        await heavy
    assert (refused.value.code, refused.value.field) == ("invalid_grammar", "grammar")
    assert time.monotonic() - began < child.WALL_S + 5
    await checker.check(Constraint.REGEX, "c+", field="regex")
