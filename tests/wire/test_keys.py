"""Keys while a gateway runs: they end at once, give way to successors, and what they did is on record."""

import json
import time
from datetime import UTC, datetime, timedelta

import httpx

from gateway.auth.keys import mint, rotate
from gateway.auth.master import open_keyring
from gateway.core.ids import KeyId
from gateway.core.ports import UnitOfWork
from gateway.core.principals import ALL_SCOPES, Scope
from tests.wire.gateways import Gateway
from tests.wire.training import new_session


def key_of(gateway: Gateway, project: str = "mine", scopes: frozenset[Scope] = ALL_SCOPES) -> str:
    async def minted(unit: UnitOfWork) -> str:
        project_id = await unit.keys.ensure_project(project)
        keyring = open_keyring(gateway.settings)
        _, text = await mint(unit, keyring, project_id=project_id, name="one", scopes=scopes, at=datetime.now(UTC))
        return text

    return gateway.in_unit(minted)


def await_refusal(client: httpx.Client) -> None:
    while client.get("/sessions").status_code != 401:
        time.sleep(0.02)


def test_a_key_that_another_process_revokes_is_refused_within_a_second(gateway: Gateway) -> None:
    key = key_of(gateway)
    with gateway.client(key) as client:
        assert client.get("/sessions").status_code == 200
        gateway.in_unit(lambda unit: unit.keys.revoke(KeyId(key.split("-")[1]), datetime.now(UTC)))
        revoked = time.monotonic()
        await_refusal(client)
        assert time.monotonic() - revoked < 1


def test_a_rotated_key_works_through_its_grace_and_its_successor_after(gateway: Gateway) -> None:
    old = key_of(gateway)

    async def rotated(unit: UnitOfWork, grace: timedelta) -> str:
        _, text = await rotate(
            unit, open_keyring(gateway.settings), KeyId(old.split("-")[1]), at=datetime.now(UTC), grace=grace
        )
        return text

    first = gateway.in_unit(lambda unit: rotated(unit, timedelta(hours=1)))
    with gateway.client(old) as before, gateway.client(first) as after:
        assert (before.get("/sessions").status_code, after.get("/sessions").status_code) == (200, 200)
        second = gateway.in_unit(lambda unit: rotated(unit, timedelta(0)))
        await_refusal(before)
        assert after.get("/sessions").status_code == 200
    assert len({old, first, second}) == 3


def test_a_change_is_in_the_audit_log_and_a_refused_one_is_not(gateway: Gateway, client: httpx.Client) -> None:
    session = new_session(client)["id"]
    stopped = client.delete(f"/sessions/{session}", headers={"X-Request-Id": "req-of-mine"})
    assert stopped.status_code == 200
    assert client.delete("/sessions/nothing", headers={"X-Request-Id": "req-refused"}).status_code == 404

    entries = client.get("/audit", params={"limit": 50}).json()["data"]
    newest = entries[0]
    assert newest["action"] == "DELETE /training/v1/sessions/{session_id}"
    assert (newest["subject"], newest["request_id"]) == (f"session_id={session}", "req-of-mine")
    assert newest["actor"] == gateway.keys.owner.split("-")[1]
    assert "req-refused" not in json.dumps(entries)
    with gateway.client(gateway.keys.stranger) as other:
        assert session not in other.get("/audit").text
    with gateway.client(gateway.keys.inference_only) as other:
        assert other.get("/audit").status_code == 403
