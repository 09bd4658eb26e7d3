"""Versions that are deleted or expire under a running request: it ends as it began, and its files stay until then."""

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.engines.launch import launch_scripted
from tests.engines.fixtures import endpoint_of, running_engine, scripted_spec
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.test_openai_streams import long_stream
from tests.wire.training import datum, new_session, run

TOKEN_MS = 12
PURGE_S = 30.0  # a sweep a second, and the engine must have been quiet for five


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that removes deleted versions at once, in front of an engine that takes its time."""
    folder = tmp_path_factory.mktemp("hasty")
    spec = scripted_spec()
    launch = launch_scripted(spec)
    delayed = dataclasses.replace(launch, command=(*launch.command, "--token-delay-ms", str(TOKEN_MS)))
    with (
        running_engine(delayed, spec.url, folder / "engine.log"),
        running_gateway(
            endpoint_of(spec, vocab_size=256), folder / "data", trainer=True, env={"LOOPLINE_UNDELETE_S": "0"}
        ) as gateway,
    ):
        yield gateway


def saved(client: httpx.Client, **labels: Any) -> str:
    session = new_session(client)["id"]
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights", **labels)
    return session


@pytest.mark.parametrize("end", ["deleted", "expired"])
def test_a_running_answer_ends_as_it_began_and_new_ones_are_refused(hasty: Gateway, end: str) -> None:
    with hasty.client() as client, hasty.openai_client() as chat:
        session = saved(client)
        version = client.get(f"/model_packages/{session}/1").json()
        (directory,) = hasty.settings.artifact_dir.glob(f"{version['id']}*")
        body = {**long_stream(hasty, client, session), "model": f"{session}@1", "max_tokens": 200}
        whole = chat.post("/completions", json={**body, "stream": False, "stream_options": None}).json()["choices"][0]

        frames: list[dict[str, Any]] = []
        with chat.stream("POST", "/completions", json=body) as stream:
            assert stream.headers["X-Loopline-Version"] == f"{session}@1"
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                frames.append(json.loads(line[6:]))
                if len(frames) == 1:
                    if end == "deleted":
                        client.delete(f"/model_packages/{session}/1", params={"force": True}).raise_for_status()
                    else:
                        client.patch(f"/model_packages/{session}/1", json={"ttl_seconds": 1}).raise_for_status()
            assert directory.exists()
        text = "".join(choice["text"] for frame in frames for choice in frame["choices"])
        assert text == whole["text"]
        assert {frame["system_fingerprint"] for frame in frames} == {version["fingerprint"]}
        refused = client.post("/sample", json={"version": f"{session}@1", "prompt": [97], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, f"version_{end}")

        deadline = time.monotonic() + PURGE_S
        while client.get(f"/model_packages/{session}/1").json()["purged_at"] is None:
            assert time.monotonic() < deadline
        assert not directory.exists()
        back = client.post(f"/model_packages/{session}/1/undelete")
        assert (back.status_code, back.json()["error"]["code"]) == (409, "undelete_window_over")
