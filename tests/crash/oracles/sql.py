"""What the database must look like after a run, in plain SQL. SQLite and PostgreSQL alike."""

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tests.crash.history import History
from tests.crash.plan import Plan, SessionPlan, Step

FINAL = ("completed", "failed", "skipped", "cancelled")
_NAMED = "FROM sessions s LEFT JOIN clients c ON c.id = s.client_id WHERE coalesce(s.name, c.name) = :name"
"""A plan's session: by its own name, or by that of the client that opened it."""


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """Open a connection of its own for reading."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def rows(connection: Connection, query: str, **values: Any) -> Sequence[Mapping[str, Any]]:
    return [dict(row) for row in connection.execute(text(query), values).mappings()]


def violations(url: str, plan: Plan, history: History, artifacts: Path) -> list[str]:
    """Check everything; return what is wrong."""
    with connected(url) as connection:
        found = _integrity(connection)
        for session in plan.sessions:
            found += _session(connection, session, history)
        found += _acknowledged(connection, history)
        found += _versions(connection, artifacts)
        found += _postings(connection)
    return found


def _integrity(connection: Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return []
    found = [f"foreign key broken: {row}" for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
    report = connection.exec_driver_sql("PRAGMA integrity_check").scalar_one()
    return found if report == "ok" else [*found, f"integrity_check: {report}"]


def _acknowledged(connection: Connection, history: History) -> list[str]:
    """Nothing that was acknowledged is lost, and nothing sits under another place than it was acknowledged for."""
    known = {row["id"]: row for row in rows(connection, "SELECT id, seq, status FROM operations")}
    found: list[str] = []
    for ack in history.acknowledged():
        row = known.get(ack.id)
        if row is None:
            found.append(f"{ack.session}/{ack.seq}: acknowledged as {ack.id} and lost")
        elif row["seq"] != ack.seq:
            found.append(f"{ack.session}/{ack.seq}: acknowledged as {ack.id}, which has seq {row['seq']}")
        elif row["status"] not in FINAL:
            found.append(f"{ack.session}/{ack.seq}: still {row['status']}")
    return found


def _session(connection: Connection, plan: SessionPlan, history: History) -> list[str]:
    sessions = rows(connection, f"SELECT s.* {_NAMED}", name=plan.name)
    if len(sessions) != 1:
        return [f"{plan.name}: {len(sessions)} sessions of that name"]
    session = sessions[0]
    operations = rows(connection, "SELECT * FROM operations WHERE session_id = :id ORDER BY seq", id=session["id"])
    facts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for fact in rows(connection, "SELECT * FROM usage_facts WHERE source LIKE 'op-%'"):
        facts[fact["source"]].append(fact)
    found = [
        f"{plan.name}/{operation['seq']}: billed to session {fact['session_id']}"
        for operation in operations
        for fact in facts[operation["id"]]
        if fact["session_id"] != session["id"]
    ]
    if [operation["seq"] for operation in operations] != [step.seq for step in plan.steps]:
        found.append(f"{plan.name}: seqs {[operation['seq'] for operation in operations]}")
    for step, operation in zip(plan.steps, operations, strict=False):
        found += _operation(plan.name, step, operation, facts[operation["id"]])
    found += _order(plan.name, operations)
    results = history.results()
    for operation in operations:
        seen = results.get((plan.name, operation["seq"]))
        if seen is not None and seen["status"] != operation["status"]:
            found.append(f"{plan.name}/{operation['seq']}: reported {seen['status']}, recorded {operation['status']}")
    if session["applied_seq"] != plan.probe.seq:
        found.append(f"{plan.name}: applied_seq {session['applied_seq']} of {plan.probe.seq}")
    if session["status"] != "running" or session["failure"] is not None:
        found.append(f"{plan.name}: the session is {session['status']}: {session['failure']}")
    return found


def _operation(name: str, step: Step, operation: Mapping[str, Any], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One kind, one outcome, one bill."""
    where, found = f"{name}/{step.seq}", list[str]()
    if operation["kind"] != step.verb:
        found.append(f"{where}: is a {operation['kind']}, was submitted as {step.verb}")
    wanted = "completed" if step.failure is None else "failed"
    if operation["status"] != wanted and not (step.frail and operation["status"] == "failed"):
        found.append(f"{where}: {step.verb} is {operation['status']}, must be {wanted}")
    billed = {fact["meter"]: fact["quantity"] for fact in facts}
    if billed != ({"train": step.tokens} if step.tokens else {}):
        found.append(f"{where}: billed {billed} for {step.tokens} tokens")
    return found


def _order(name: str, operations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Operations were taken up in the order of their seqs, none before the one before it was dealt with."""
    found: list[str] = []
    for before, after in itertools.pairwise(operations):
        if before["started_at"] is None or after["started_at"] is None:
            continue
        if before["started_at"] > after["started_at"]:
            found.append(f"{name}/{after['seq']}: started before {before['seq']}")
        published_later = before["kind"] == "save_weights"
        if not published_later and before["finished_at"] > after["started_at"]:
            found.append(f"{name}/{after['seq']}: started before {before['seq']} was finished")
    return found


def _versions(connection: Connection, artifacts: Path) -> list[str]:
    """Every listed version is whole, numbered without a gap, and belongs to one completed save."""
    found: list[str] = []
    numbers: dict[str, list[int]] = defaultdict(list)
    versions = rows(
        connection,
        "SELECT v.*, o.status AS save_status, o.kind AS save_kind, o.seq AS save_seq FROM versions v"
        " LEFT JOIN operations o ON o.id = v.operation_id ORDER BY v.group_name, v.number",
    )
    for version in versions:
        numbers[version["group_name"]].append(version["number"])
        if version["save_status"] not in ("completed", "running") or not str(version["save_kind"]).startswith("save_"):
            found.append(f"{version['id']}: listed, its save is {version['save_status']}")
        if version["seq"] != version["save_seq"]:
            found.append(f"{version['id']}: says it contains seq {version['seq']}, was saved at {version['save_seq']}")
        found += damaged(artifacts / version["location"], version["manifest_sha256"])
    for group, given in numbers.items():
        if given != list(range(1, len(given) + 1)):
            found.append(f"group {group} has versions {given}")
    saves = Counter(version["operation_id"] for version in versions)
    for save in rows(connection, "SELECT id, seq FROM operations WHERE kind LIKE 'save_%' AND status = 'completed'"):
        if saves[save["id"]] != 1:
            found.append(f"save {save['id']} (seq {save['seq']}) completed and has {saves[save['id']]} versions")
    return found


def damaged(directory: Path, manifest_sha256: str) -> list[str]:
    """Return how a stored version differs from its manifest, and the manifest from the recorded hash."""
    try:
        manifest = (directory / "manifest.json").read_bytes()
    except OSError as error:
        return [f"{directory.name}: {error}"]
    if hashlib.sha256(manifest).hexdigest() != manifest_sha256:
        return [f"{directory.name}: the manifest is not the recorded one"]
    files: Mapping[str, Any] = json.loads(manifest)["files"]
    present = {path.name for path in directory.iterdir()} - {"manifest.json"}
    found = [f"{directory.name}: has {sorted(present)}, lists {sorted(files)}"] if present != set(files) else []
    for name in present & set(files):
        if hashlib.sha256((directory / name).read_bytes()).hexdigest() != files[name]["sha256"]:
            found.append(f"{directory.name}/{name}: not what was hashed")
    return found


def _postings(connection: Connection) -> list[str]:
    """Where there is a ledger: its entries balance, and no effect is posted twice."""
    if not {"postings", "entries"} <= set(inspect(connection).get_table_names()):
        return []
    columns = {column["name"] for column in inspect(connection).get_columns("entries")}
    amount = next((name for name in ("amount_nanos", "amount") if name in columns), None)
    posting = next((name for name in ("posting_id", "posting") if name in columns), None)
    if amount is None or posting is None:
        return []
    unbalanced = rows(
        connection, f"SELECT {posting} AS posting FROM entries GROUP BY {posting} HAVING SUM({amount}) <> 0"
    )
    return [f"posting {row['posting']} does not balance" for row in unbalanced]


def final_file(connection: Connection, session: str, seq: int, artifacts: Path, name: str) -> Path:
    """Return the file ``name`` of the version that the save at ``seq`` made."""
    found = rows(
        connection,
        f"SELECT v.location FROM versions v JOIN operations o ON o.id = v.operation_id AND o.seq = :seq"
        f" WHERE o.session_id IN (SELECT s.id {_NAMED})",
        name=session,
        seq=seq,
    )
    return artifacts / found[0]["location"] / name
