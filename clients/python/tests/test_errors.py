"""Errors say who is at fault, and survive a process boundary."""

import pickle

import pytest

import loopline
from loopline.errors import api_error_class

FACTS = {"code": "c", "kind": "invalid", "field": "data[0]", "details": {"datum": 0}}
ERRORS = [
    loopline.ConnectionFailed("gone", "optim_step"),
    *(
        api_error_class(status)("no", status=status, request_id="req-1", during="sample", **FACTS)  # pyright: ignore[reportArgumentType]
        for status in (400, 401, 402, 403, 404, 409, 410, 413, 422, 429, 500, 502, 503)
    ),
    loopline.OperationError("no", operation_type="optim_step", operation_id="op-1", session_id="s", seq=3, **FACTS),  # pyright: ignore[reportArgumentType]
    loopline.IncompleteGradient("held back"),
    loopline.ResultMismatchError("odd"),
    loopline.ClientStopped("stopped"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_pickles_with_its_attributes(error: loopline.LooplineError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_errors_also_are_what_the_standard_library_calls_them() -> None:
    assert isinstance(loopline.ConnectionFailed("gone"), ConnectionError)
    assert isinstance(ERRORS[1], ValueError)
    assert isinstance(loopline.ClientStopped("stopped"), RuntimeError)


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    def refused(status: int, kind: str) -> bool:
        return loopline.is_retryable(api_error_class(status)("no", status=status, code="c", kind=kind))

    assert loopline.is_retryable(loopline.ConnectionFailed("gone"))
    assert refused(429, "exhausted")
    assert refused(503, "unavailable")
    assert refused(500, "internal")
    assert not refused(400, "invalid")
    assert not refused(402, "out_of_budget")
    assert not refused(409, "conflict")
    assert not loopline.is_retryable(ValueError("no"))
