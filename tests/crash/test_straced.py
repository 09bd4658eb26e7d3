from tests.crash.straced import Needs, parse, unhealed, unsupported

WAL = "/data/loopline.db-wal"
FILE = "/data/blobs/proj/ab/abcd"
NEEDS = Needs(operation_id="op-1", body_file=None)
WRITE = '10 100.10 pwrite64(15</data/loopline.db-wal>, "...op-1...", 4096, 0) = 4096 <0.01>'
SYNC = "10 100.20 fdatasync(15</data/loopline.db-wal>) = 0 <0.05>"
ANSWER = '11 100.30 write(7<TCP:[127.0.0.1:1->127.0.0.1:2]>, "{\\"id\\":\\"op-1\\"}", 20) = 20 <0.001>'


def test_an_answer_after_write_and_sync_has_support() -> None:
    assert unsupported(parse([WRITE, SYNC, ANSWER]), NEEDS, log="loopline.db-wal") == []


def test_an_answer_without_a_sync_that_followed_its_record_has_none() -> None:
    early = SYNC.replace("100.20", "100.05")
    late = SYNC.replace("100.20", "100.28")
    failed = SYNC.replace("= 0", "= -1 EIO (Input/output error) (INJECTED)")
    for sync in (early, late, failed):
        found = unsupported(parse([WRITE, sync, ANSWER]), NEEDS, log="loopline.db-wal")
        assert found == ["op-1: answered before its log record was synced"]
    assert unsupported(parse([SYNC, ANSWER]), NEEDS, log="loopline.db-wal") == ["op-1: no log record was seen"]


def test_a_call_that_was_interrupted_is_joined_from_its_two_lines() -> None:
    lines = [
        WRITE,
        "10 100.20 fdatasync(15</data/loopline.db-wal> <unfinished ...>",
        '12 100.21 write(2</data/gateway.log>, "x", 1) = 1 <0.001>',
        "10 100.28 <... fdatasync resumed>) = 0 <0.08>",
    ]
    (sync,) = [call for call in parse(lines) if call.name == "fdatasync"]
    assert (sync.began, round(sync.ended, 2), sync.result, sync.path) == (100.20, 100.28, 0, WAL)
    assert unsupported(parse([*lines, ANSWER]), NEEDS, log="loopline.db-wal") == []


def test_a_body_needs_its_content_its_name_and_its_directory() -> None:
    content = "13 100.01 fsync(9</data/blobs/proj/ab/.abcd.77>) = 0 <0.01>"
    name = '13 100.03 rename("/data/blobs/proj/ab/.abcd.77", "/data/blobs/proj/ab/abcd") = 0 <0.001>'
    directory = "13 100.05 fsync(9</data/blobs/proj/ab>) = 0 <0.01>"
    needs = Needs(operation_id="op-1", body_file=FILE)

    def found(*body: str) -> list[str]:
        return unsupported(parse([*body, WRITE, SYNC, ANSWER]), needs, log="loopline.db-wal")

    assert found(content, name, directory) == []
    assert found(name, directory) == ["op-1: its body got its name before its content was synced"]
    assert found(content, name) == ["op-1: answered before the directory of its body was synced"]
    assert found(content, directory) == ["op-1: answered before its body had its name"]


def test_no_answer_leaves_behind_a_failed_sync_before_the_log_has_begun_anew() -> None:
    failed = "10 100.12 fdatasync(15</data/loopline.db-wal>) = -1 EIO (Input/output error) (INJECTED) <0.01>"
    header = '10 100.15 pwrite64(15</data/loopline.db-wal>, "7\\177\\6\\202", 32, 0) = 32 <0.001>'

    def found(*lines: str) -> list[str]:
        return unhealed(parse([failed, *lines, SYNC, ANSWER]), [NEEDS], log="loopline.db-wal")

    assert found(WRITE, header) == []
    assert found(WRITE) == ["answered 0.170 s after a failed sync of the log, which went on behind the hole"]
    assert found(header.replace("32, 0", "4096, 4120")) == found(WRITE)


def test_an_answer_whose_record_was_synced_before_the_failed_sync_may_leave_after_it() -> None:
    failed = "10 100.27 fdatasync(15</data/loopline.db-wal>) = -1 EIO (Input/output error) (INJECTED) <0.001>"
    early = SYNC.replace("100.20", "100.04")

    def found(*lines: str) -> list[str]:
        return unhealed(parse([*lines, failed, ANSWER]), [NEEDS], log="loopline.db-wal")

    assert found(WRITE, SYNC) == []
    assert found(early, WRITE) == ["answered 0.029 s after a failed sync of the log, which went on behind the hole"]
