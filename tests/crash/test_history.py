from pathlib import Path
from typing import Any

from tests.crash.history import Call, Event, History, Kind, contradictions


def history(*events: tuple[Kind, Call, int, Any]) -> History:
    found = History()
    for kind, call, seq, value in events:
        found.add(Event(at=0.0, kind=kind, call=call, subject="s", seq=seq, value=value))
    return found


def test_a_retry_that_gets_the_same_answer_contradicts_nothing() -> None:
    found = history(
        (Kind.INVOKE, Call.SUBMIT, 1, None),
        (Kind.UNKNOWN, Call.SUBMIT, 1, "ReadError"),
        (Kind.OK, Call.SUBMIT, 1, {"id": "op-1"}),
        (Kind.OK, Call.SUBMIT, 1, {"id": "op-1"}),
        (Kind.OK, Call.RESULT, 1, {"id": "op-1", "status": "completed"}),
    )

    assert contradictions(found) == []
    assert [ack.id for ack in found.acknowledged()] == ["op-1", "op-1"]
    assert found.results()["s", 1]["status"] == "completed"


def test_two_ids_two_results_two_answers_and_refusals_are_contradictions() -> None:
    found = contradictions(
        history(
            (Kind.OK, Call.SUBMIT, 1, {"id": "op-1"}),
            (Kind.OK, Call.SUBMIT, 1, {"id": "op-2"}),
            (Kind.OK, Call.RESULT, 1, {"status": "completed", "finished_at": 1}),
            (Kind.OK, Call.RESULT, 1, {"status": "completed", "finished_at": 2}),
            (Kind.OK, Call.RESULT, 1, {"status": "failed"}),
            (Kind.OK, Call.POLL, 1, "completed"),
            (Kind.OK, Call.POLL, 1, "skipped"),
            (Kind.OK, Call.SAMPLE, 0, {"tokens": [1]}),
            (Kind.OK, Call.SAMPLE, 0, {"tokens": [2]}),
            (Kind.FAIL, Call.SUBMIT, 3, "409"),
        )
    )

    words = ["op-2", "results", "another completed", "sampling key", "refused"]
    assert len(found) == len(words)
    assert [word for word in words if any(word in line for line in found)] == words


def test_every_event_is_in_the_file_before_the_next(tmp_path: Path) -> None:
    kept = History(path=tmp_path / "history.jsonl")
    for seq in range(3):
        kept.add(Event(at=1.0, kind=Kind.INVOKE, call=Call.SUBMIT, subject="s", seq=seq))
        assert len((tmp_path / "history.jsonl").read_text().splitlines()) == seq + 1
