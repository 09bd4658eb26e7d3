"""Every operation of every dialect, every id it takes, and every caller who must not: without a key, with a dead one,
with one that lacks the scope, of another project.

The operations come from the routers. What is asked with another project's id is answered as if there were no such
thing, and changes nothing of that project.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.auth.keys import mint
from gateway.auth.master import open_keyring
from gateway.core.ports import UnitOfWork
from gateway.core.principals import ALL_SCOPES, Scope
from gateway.settings import Settings
from gateway.wire.sagemaker.control import HANDLERS
from gateway.wire.sagemaker.models import RUNTIME, service
from tests.stack import EngineEndpoint
from tests.tenancy.operations import DIALECTS, Operation, Slot
from tests.tenancy.requests import SIGNED
from tests.tenancy.routers import OPEN, mounts, open_routes, operations
from tests.tenancy.signed import SignedOperation
from tests.tenancy.world import World, build, nobody
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.signing import sign

CONTROLS: Mapping[str, int] = {
    "DELETE /training/v1/model_packages/{group}/{reference}": 409,  # an alias protects it
    "GET /tinker/api/v1/training_runs/{run_id}/checkpoints/{space}/{name}/archive": 400,  # a state stays here
    "POST /tinker/api/v1/sessions/search": 400,
    "GET /tinker/api/v1/audit": 400,
    "GET /training/v1/base_models/{name:path}/tokenizer/{file}": 404,  # the scripted engine has none
}
"""What an owner's well-formed request is answered with where that is not a success."""

UNCHANGING = frozenset(
    {
        "POST /training/v1/sample",
        "POST /training/v1/logprobs",
        "POST /training/v1/sessions/{session_id}/sample",
        "POST /training/v1/sessions/{session_id}/logprobs",
        "POST /training/v1/model_packages/{group}/{reference}/verify",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /tinker/api/v1/asample",
        "POST /tinker/api/v1/cancel_future",
        "POST /tinker/api/v1/get_info",
        "POST /tinker/api/v1/session_heartbeat",
        "PUT /tinker/api/v1/sessions/{session_id}/project",
        *(
            f"POST /sagemaker/v1/training-sessions/{{trainingSessionName}}/sampling-operations {name}"
            for name in (
                "ExecuteSamplingOperation sample",
                "ExecuteSamplingOperation computeLogprobs",
                "ExecuteSamplingOperation loadWeightsForSampling",
            )
        ),
        "POST /sagemaker/training-sessions/{trainingSessionName}/sample SampleTrainingSession",
        "POST /sagemaker/training-sessions/{trainingSessionName}/sample-with-response-stream"
        " SampleTrainingSessionWithResponseStream",
    }
)
"""What a key needs a scope for though it changes nothing that is kept: the audit log has no entry of it."""


def _application(data_dir: Path) -> Any:
    catalog = data_dir / "catalog.toml"
    catalog.write_text("")
    return create_app(Settings(data_dir=data_dir, catalog=catalog))


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _application(tmp_path_factory.mktemp("routers"))


@pytest.fixture(scope="module")
def every(application: Any) -> list[Operation]:
    return operations(application)


@pytest.fixture(scope="module")
def gateway(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(scripted_engine, tmp_path_factory.mktemp("tenancy") / "data", trainer=True) as started:
        yield started


@pytest.fixture(scope="module")
def mine(gateway: Gateway) -> World:
    return build(gateway, gateway.keys.owner, "mine")


@pytest.fixture(scope="module")
def theirs(gateway: Gateway) -> World:
    return build(gateway, gateway.keys.stranger, "theirs")


@pytest.fixture(scope="module")
def narrow(gateway: Gateway, mine: World) -> dict[Scope, str]:
    """A key of the owner's project for every scope."""

    async def minted(unit: UnitOfWork) -> dict[Scope, str]:
        keyring, project = open_keyring(gateway.settings), await unit.keys.ensure_project("mine")
        keys: dict[Scope, str] = {}
        for scope in Scope:
            _, keys[scope] = await mint(
                unit, keyring, project_id=project, name=scope, scopes=frozenset({scope}), at=datetime.now(UTC)
            )
        return keys

    return gateway.in_unit(minted)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client


def test_every_dialect_and_every_name_is_in_the_matrix(application: Any, every: list[Operation]) -> None:
    assert {operation.mount for operation in every} == set(mounts(application)) == set(DIALECTS)
    assert not {operation.name: operation.unknown for operation in every if operation.unknown}
    assert open_routes(application) < OPEN
    signed = {one.model.name for one in every if isinstance(one, SignedOperation)}
    assert signed == {*HANDLERS, *service(RUNTIME).operations}
    assert len(every) > 110


def test_without_a_living_key_nothing_is_told_apart(
    gateway: Gateway, http: httpx.Client, every: list[Operation], mine: World
) -> None:
    keys = gateway.keys
    before = rows_of(gateway)
    for operation in every:
        unkeyed = {seen(http.send(operation.request(gateway.url, world, None))) for world in (mine, nobody())}
        dead = {
            seen(http.send(operation.request(gateway.url, mine, key)))
            for key in ("tml-no", keys.unknown, keys.revoked, keys.expired)
        }
        assert {status for status, _ in unkeyed | dead} == {operation.unauthenticated}, operation.name
        assert (len(unkeyed), len(dead)) == (1, 1), (operation.name, unkeyed, dead)
        assert unkeyed == dead or operation.mount == SIGNED, operation.name  # which says how to sign
    assert rows_of(gateway) == before


def test_a_key_does_what_its_scope_says_and_no_more(
    gateway: Gateway, http: httpx.Client, every: list[Operation], mine: World, narrow: Mapping[Scope, str]
) -> None:
    before = rows_of(gateway)
    refused = 0
    for operation in every:
        for scope, key in narrow.items():
            world = nobody() if operation.admits(scope) and operation.needs else mine
            answer = http.send(operation.request(gateway.url, world, key))
            if operation.admits(scope):
                assert answer.status_code < 500, (operation.name, answer.text)
                assert "missing_scope" not in answer.text, (operation.name, scope)
            else:
                refusal = (answer.status_code, "missing_scope" in answer.text)
                assert refusal == (operation.forbidden, True), (operation.name, scope)
                refused += 1
    assert refused > 80
    made = {name for name, rows in rows_of(gateway).items() if rows != before[name]}
    assert made <= {"sessions", "clients", "model_package_groups", "audit"}, (
        "only what names nothing (open a session, a program, a group) may have been done"
    )


def test_what_is_anothers_is_not_there(
    gateway: Gateway, http: httpx.Client, every: list[Operation], mine: World, theirs: World
) -> None:
    none, owner = nobody(), gateway.keys.owner
    before = rows_of(gateway, "theirs")
    asked = 0
    for operation in every:
        for slot in operation.slots:
            for kind in slot.kinds:
                foreign, missing = (
                    _outcome(http, operation.request(gateway.url, mine, owner, but=_at(slot, world[kind])), owner)
                    for world in (theirs, none)
                )
                assert seen(foreign, theirs) == seen(missing, none), (operation.name, slot)
                assert not foreign.status_code >= 500, (operation.name, slot)
                asked += 1
    assert asked > 120
    assert rows_of(gateway, "theirs") == before


def test_an_owner_is_answered_and_sees_nothing_of_others(
    gateway: Gateway, http: httpx.Client, every: list[Operation], mine: World, theirs: World
) -> None:
    """The control: the same requests with the owner's own ids succeed. What removes things comes last."""
    mutating = rows_of(gateway, "theirs")
    changed: dict[str, str] = {}
    for operation in sorted(every, key=lambda one: (one.ends, one.method == "DELETE")):
        answer = http.send(operation.request(gateway.url, mine, gateway.keys.owner))
        wanted = CONTROLS.get(operation.name)
        assert answer.status_code == wanted if wanted else answer.is_success, (operation.name, answer.text)
        if operation.needs and operation.method != "GET" and answer.is_success and operation.name not in UNCHANGING:
            changed[answer.headers["X-Request-Id"]] = operation.name
        told = answer.content
        assert not [kind for kind, id in theirs.items() if kind != "state_name" and id.encode() in told], operation.name
    assert rows_of(gateway, "theirs") == mutating
    noted = {row[-1] for row in rows_of(gateway, "mine")["audit"]}
    assert len(changed) > 25
    assert not [name for request_id, name in changed.items() if request_id not in noted]


def _outcome(http: httpx.Client, request: httpx.Request, key: str) -> httpx.Response:
    """Return the answer; of a question that is answered in the background, what came of it."""
    answer = http.send(request)
    if not (answer.is_success and request.url.path.endswith("/sampling-operations")):
        return answer
    url = f"{request.url}/{answer.json()['operationId']}"
    while True:
        result = http.send(sign(httpx.Request("GET", url), key))
        if result.json()["status"] != "InProgress":
            return result


def _at(slot: Slot, value: str) -> dict[Slot, str]:
    return {slot: value}


def seen(response: httpx.Response, world: World | None = None) -> tuple[int, str]:
    """Return what a caller can tell from an answer, the ids it asked for and the request id left out."""
    text = response.text.replace(response.headers["X-Request-Id"], "REQUEST")
    for kind, id in sorted((world or {}).items(), key=lambda item: -len(item[1])):
        text = text.replace(id, f"<{kind}>")
    return response.status_code, text


_RESTLESS = {"last_used_at", "expires_at", "seen_at", "served_at", "lease_owner", "lease_until", "epoch"}


def rows_of(gateway: Gateway, project: str | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row that belongs to a tenant, of one project or all, by table; times of use left out."""
    path = gateway.settings.resolved_database_url.removeprefix("sqlite:///")
    found: dict[str, list[tuple[Any, ...]]] = {}
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            if "project_id" not in columns or table.startswith(("ledger_", "usage_", "holds", "rate_")):
                continue
            names = ", ".join(column for column in columns if column not in _RESTLESS)
            where = " WHERE project_id = (SELECT id FROM projects WHERE name = ?)" if project else ""
            found[table] = connection.execute(
                f"SELECT {names} FROM {table}{where}", [project] if project else []
            ).fetchall()
    return found


def test_scopes_are_words_that_a_key_can_have() -> None:
    assert {scope.value for scope in Scope} == {"read-only", "inference", "train", "admin"}
    assert Scope.READ_ONLY not in ALL_SCOPES
