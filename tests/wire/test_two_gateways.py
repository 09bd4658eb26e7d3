"""Two gateways in front of one engine: they divide its slots, and neither removes what the other works with."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.ids import KeyId
from gateway.engines.launch import launch_scripted
from tests.engines.fixtures import endpoint_of, running_engine, scripted_spec
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, joined_gateway, running_gateway
from tests.wire.test_keys import await_refusal, key_of
from tests.wire.training import trained_session

SLOTS = 3
ENV = {"LOOPLINE_UNDELETE_S": "0"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineEndpoint]:
    """5 ms a token, and a metric of how many adapters were ever at work at once."""
    spec = scripted_spec()
    log = tmp_path_factory.mktemp("shared-engine") / "engine.log"
    with running_engine(launch_scripted(spec, token_delay_ms=5), spec.url, log):
        yield endpoint_of(spec, vocab_size=256)


@pytest.fixture(scope="module")
def both(engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Gateway]]:
    data_dir = tmp_path_factory.mktemp("two-gateways") / "data"
    with (
        running_gateway(engine, data_dir, trainer=True, env=ENV) as first,
        joined_gateway(first, engine, env=ENV) as second,
    ):
        while _slots(first, "capacity") != 4 * SLOTS / 2:
            pass  # it hears of the other at its next heartbeat
        yield first, second


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def _slots(gateway: Gateway, what: str) -> float:
    headers = {"Authorization": f"Bearer {gateway.keys.owner}"}
    text = httpx.get(f"{gateway.url}/metrics", headers=headers, timeout=30).text
    return _metric(text, rf'loopline_engine_slots{{[^}}]*what="{what}"[^}}]*}}')


def _sample(client: httpx.Client, version: str, tokens: int = 12) -> Any:
    body = {"version": version, "prompt": [97, 98], "max_tokens": tokens, "seed": 5, "ignore_eos": True}
    answer = client.post("/sample", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Loopline-Version"] == version
    return answer.json()["sequences"]


def test_a_key_that_is_revoked_is_refused_by_both_within_a_second(both: tuple[Gateway, Gateway]) -> None:
    key = key_of(both[0])
    with both[0].client(key) as one, both[1].client(key) as other:
        assert [client.get("/sessions").status_code for client in (one, other)] == [200, 200]
        both[0].in_unit(lambda unit: unit.keys.revoke(KeyId(key.split("-")[1]), datetime.now(UTC)))
        revoked = time.monotonic()
        for client in (one, other):
            await_refusal(client)
        assert time.monotonic() - revoked < 1


def test_more_versions_than_slots_answer_each_for_itself_through_both(
    both: tuple[Gateway, Gateway], engine: EngineEndpoint
) -> None:
    with ExitStack() as opened:
        clients = [opened.enter_context(gateway.client()) for gateway in both]
        versions = [f"{trained_session(clients[0])}@1" for _ in range(8)]
        quiet = {version: _sample(clients[0], version) for version in versions}
        assert len({repr(answer) for answer in quiet.values()}) == len(versions)

        asked = [(client, version) for _ in range(4) for version in versions for client in clients]
        pool = opened.enter_context(ThreadPoolExecutor(16))
        answers = list(pool.map(lambda one: _sample(*one), asked))

    assert answers == [quiet[version] for _, version in asked]
    metrics = httpx.get(f"{engine.url}/metrics", headers={"Authorization": f"Bearer {engine.key}"}).text
    assert 2 <= _metric(metrics, "scripted:most_adapters_at_once") <= SLOTS  # one each, and one for publications
    loaded, capacity = ([_slots(gateway, what) for gateway in both] for what in ("loaded", "capacity"))
    assert capacity == [4 * SLOTS / 2] * 2
    assert max(loaded) <= 4 * SLOTS / 2, loaded


def test_a_version_that_one_deletes_goes_on_answering_in_the_other_until_that_is_done(
    both: tuple[Gateway, Gateway],
) -> None:
    first, second = both
    with first.client() as here, second.client() as there, ThreadPoolExecutor(1) as pool:
        session = trained_session(here)
        version = f"{session}@1"
        whole = _sample(here, version, 30)
        row = here.get(f"/model_packages/{session}/1").json()
        files = next(first.settings.artifact_dir.glob(f"{row['id']}*"))
        running = pool.submit(_sample, there, version, 500)
        while _slots(second, "in_use") == 0:
            assert not running.done()

        assert here.delete(f"/model_packages/{session}/1", params={"force": True}).status_code == 200
        for client in (here, there):
            refused = client.post("/sample", json={"version": version, "prompt": [97], "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "version_deleted")
        assert running.result()[0]["tokens"][:30] == whole[0]["tokens"]
        while here.get(f"/model_packages/{session}/1").json()["purged_at"] is None:
            pass
    assert not Path(files).exists()
