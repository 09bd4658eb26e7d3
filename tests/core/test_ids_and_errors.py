"""Ids sort and fit every dialect; errors cross a process boundary whole."""

import pickle
import re
import time

import pytest

from gateway.core import errors, ids
from gateway.core.canary import CanaryMismatch
from gateway.core.errors import GatewayError, Invalid, Kind, SequenceReused
from gateway.core.ledger import OutOfBudget

MAKERS = {
    "proj-": ids.new_project_id,
    "sess-": ids.new_session_id,
    "op-": ids.new_operation_id,
    "ver-": ids.new_version_id,
    "smp-": ids.new_sample_id,
}


@pytest.mark.parametrize("prefix", MAKERS)
def test_an_id_is_legal_in_every_dialect_and_names_its_kind(prefix: str) -> None:
    id = MAKERS[prefix]()

    assert id.startswith(prefix)
    assert re.fullmatch(r"[a-z0-9-]+", id)
    assert len(id) == len(prefix) + 26


def test_ids_do_not_repeat() -> None:
    assert len({ids.new_operation_id() for _ in range(10_000)}) == 10_000


def test_later_ids_sort_later() -> None:
    first = ids.new_session_id()
    millisecond = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == millisecond:
        pass

    assert first < ids.new_session_id()


def test_a_key_id_has_twenty_characters_and_no_dash() -> None:
    assert re.fullmatch(r"[a-z0-9]{20}", ids.new_key_id())


def every_error() -> list[GatewayError]:
    """One of every class of the tree, with all its fields set."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GatewayError)]
    made = [
        kind("what", code="c", field="data[3].x", details={"limit": 5, "ratio": 0.5, "name": "n"})
        for kind in [*classes, CanaryMismatch, OutOfBudget]
        if kind is not SequenceReused
    ]
    return [*made, SequenceReused("sess-1", 7)]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_whole(error: GatewayError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert (str(copy), copy.kind) == (error.message, error.kind)


def test_an_error_without_a_code_takes_its_classes() -> None:
    assert (Invalid("x").code, GatewayError("x").code) == ("invalid_request", "internal_error")


def test_every_kind_is_spoken_by_some_error() -> None:
    assert {error.kind for error in every_error()} == set(Kind)


def test_a_reused_sequence_names_the_session_and_the_number() -> None:
    error = SequenceReused("sess-1", 7)

    assert (error.code, error.field) == ("sequence_reused", "seq")
    assert "operation 7 of sess-1" in error.message
