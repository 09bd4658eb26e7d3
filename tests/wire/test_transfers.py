"""Versions that leave and adapters that come, over the native surface."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from gateway.core.scripted import SCRIPTED_NAME
from tests.core.test_adapter_files import CONFIG, tensors, write
from tests.wire.gateways import Gateway
from tests.wire.training import BASE, datum, finish, new_session, run, trained_session

TAR = {"Content-Type": "application/x-tar"}


def archive_of(directory: Path) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            archive.add(directory / name, name)
    return target.getvalue()


@pytest.fixture
def adapter(tmp_path: Path) -> bytes:
    return archive_of(write(tmp_path, tensors(value=0.25)))


def imported(client: httpx.Client, group: str, content: bytes, **params: Any) -> httpx.Response:
    headers = {**TAR, **params.pop("headers", {})}
    return client.post(
        f"/model_packages/{group}/import", params={"base_model": BASE, **params}, content=content, headers=headers
    )


def exported(client: httpx.Client, session: str) -> dict[str, Any]:
    answer = client.get(f"/model_packages/{session}/1/export")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_version_leaves_as_files_and_as_one_archive_without_a_key(client: httpx.Client) -> None:
    links = exported(client, trained_session(client))

    (file,) = links["files"]
    content = httpx.get(file["url"]).content
    assert (file["name"], len(content)) == (SCRIPTED_NAME, file["size_bytes"])
    assert hashlib.sha256(content).hexdigest() == file["sha256"]
    whole = httpx.get(links["archive"]["url"])
    assert len(whole.content) == links["archive"]["size_bytes"] == int(whole.headers["Content-Length"])
    assert whole.headers["Content-Disposition"] == f'attachment; filename="{links["archive"]["name"]}"'
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as archive:
        assert [(member.name, member.isreg()) for member in archive] == [(SCRIPTED_NAME, True)]
        assert archive.extractfile(SCRIPTED_NAME).read() == content  # pyright: ignore


def test_a_download_that_was_cut_goes_on_where_it_ended(client: httpx.Client) -> None:
    url = exported(client, trained_session(client))["archive"]["url"]
    whole = httpx.get(url)
    size, tag = len(whole.content), whole.headers["ETag"]

    for asked, expected in {
        f"bytes={size - 700}-": whole.content[size - 700 :],
        "bytes=100-599": whole.content[100:600],
        "bytes=-5": whole.content[-5:],
        f"bytes=0-{size * 9}": whole.content,
    }.items():
        part = httpx.get(url, headers={"Range": asked, "If-Range": tag})
        assert (part.status_code, part.content) == (206, expected)
        start = size - len(expected) if asked == "bytes=-5" else int(asked[6:].partition("-")[0])
        assert part.headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/{size}"
    for headers in ({"Range": "bytes=0-4", "If-Range": '"other"'}, {"Range": "bytes=0-4,9-12"}, {"Range": "lines=1-2"}):
        assert (httpx.get(url, headers=headers).status_code, len(httpx.get(url, headers=headers).content)) == (
            200,
            size,
        )
    beyond = httpx.get(url, headers={"Range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
    head = httpx.head(url)
    assert (head.headers["Content-Length"], head.content) == (str(size), b"")


def test_a_link_opens_one_file_of_one_version_and_ends_with_it(client: httpx.Client) -> None:
    session, other = trained_session(client), trained_session(client)
    links = exported(client, session)
    url = links["files"][0]["url"]
    here, there = (client.get(f"/model_packages/{name}/1").json()["id"] for name in (session, other))

    for changed in (
        url.replace(here, there),
        url.replace(SCRIPTED_NAME, "manifest.json"),
        url.replace(SCRIPTED_NAME, "%2e%2e%2f%2e%2e%2floopline.db"),
        url.replace("expires=", "expires=9"),
        url.replace("signature=", "signature=f"),
    ):
        refused = httpx.get(changed)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_link")
    assert httpx.get(url.partition("?")[0]).status_code == 400
    assert client.delete(f"/model_packages/{session}/1", params={"force": True}).status_code == 200
    gone = httpx.get(url)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "version_deleted")


def test_states_and_strangers_versions_are_not_exported(client: httpx.Client, gateway: Gateway) -> None:
    session = trained_session(client)
    run(client, session, "save_state")

    refused = client.get(f"/model_packages/{session}/2/export")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_exportable")
    for key, status in ((gateway.keys.stranger, 404), (gateway.keys.inference_only, 403), (gateway.keys.unknown, 401)):
        with gateway.client(key) as somebody:
            assert somebody.get(f"/model_packages/{session}/1/export").status_code == status


def test_an_imported_adapter_is_a_version_that_answers_and_trains_further(client: httpx.Client, adapter: bytes) -> None:
    accepted = imported(client, "guests", adapter, name="from-peft", description="made elsewhere", tags=["a", "b"])
    assert accepted.status_code == 202, accepted.text
    done = finish(client, accepted.json()["id"])
    assert done["status"] == "completed", done

    address = done["result"]["version"]
    version = client.get(f"/versions/{address}").json()
    assert (version["state"], version["group"], version["name"]) == ("published", "guests", "from-peft")
    assert (version["tags"], version["description"], version["optimizer_step"]) == (["a", "b"], "made elsewhere", 0)
    lora = {name: version["lora"][name] for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")}
    assert lora == {"rank": 2, "alpha": 4, "train_attn": True, "train_mlp": False, "train_unembed": False}
    assert version["canary"]["mean_difference"] < 1e-6
    sampled = client.post("/sample", json={"version": address, "prompt": [97], "max_tokens": 3, "seed": 1})
    assert (sampled.status_code, sampled.json()["version"]) == (200, address)

    session = new_session(client, lora=lora)["id"]
    run(client, session, "load_state", version=address, optimizer=False)
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    further = run(client, session, "save_weights")["result"]["version"]
    assert client.get(f"/versions/{further}").json()["fingerprint"] != version["fingerprint"]


def test_an_adapter_brings_no_optimizer_and_fits_only_its_own_layout(client: httpx.Client) -> None:
    trained = trained_session(client)
    for lora, optimizer, code in (({"rank": 8}, True, "wrong_version_kind"), ({"rank": 4}, False, "lora_mismatch")):
        session = new_session(client, lora=lora)["id"]
        body = {"version": f"{trained}@1", "optimizer": optimizer}
        refused = client.post(f"/sessions/{session}/load_state", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)


def test_an_import_repeated_under_its_key_is_one_version(client: httpx.Client, adapter: bytes) -> None:
    key = {"Idempotency-Key": "import-once"}
    first = imported(client, "once", adapter, headers=key).json()
    again = imported(client, "once", adapter, headers=key).json()
    other = imported(client, "once", adapter, headers=key, description="other")

    assert first["id"] == again["id"]
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    finish(client, first["id"])
    groups = {group["name"]: group["versions"] for group in client.get("/model_packages").json()["data"]}
    assert groups["once"] == 1


@pytest.mark.parametrize(
    ("config", "content", "code", "field"),
    [
        ({"r": 3}, {}, "bad_adapter", "model.layers.0.self_attn.q_proj"),
        ({"use_dora": True}, {}, "bad_adapter", "use_dora"),
        ({"bias": "all"}, {}, "bad_adapter", "bias"),
        ({"modules_to_save": ["lm_head"]}, {}, "bad_adapter", "modules_to_save"),
        ({"r": 64}, {"rank": 64}, "rank_too_large", "lora.rank"),
        ({"lora_alpha": 1e9}, {}, "invalid_request", "lora.alpha"),
        ({"target_modules": ["router"]}, {"path": "model.layers.0.router"}, "bad_adapter", "model.layers.0.router"),
        ({}, {"value": float("nan")}, "bad_adapter", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ],
)
def test_a_bad_adapter_is_refused_by_name_and_leaves_nothing(
    client: httpx.Client, tmp_path: Path, config: dict[str, Any], content: dict[str, Any], code: str, field: str
) -> None:
    tensors_of = tensors(value=content.get("value", 0.5))
    if "rank" in content:
        rank = content["rank"]
        shapes = {"lora_A": (rank, 3), "lora_B": (5, rank)}
        tensors_of = {
            name: ("F32", (shape := shapes[name.split(".")[-2]]), bytes(4 * shape[0] * shape[1])) for name in tensors_of
        }
    if "path" in content:
        tensors_of = {
            name.replace("model.layers.0.self_attn.q_proj", content["path"]): value
            for name, value in tensors_of.items()
        }
    before = client.get("/sessions").json()["data"][:1]

    refused = imported(client, "refused", archive_of(write(tmp_path, tensors_of, CONFIG | config)))

    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["field"]) == (400, code, field), error
    assert client.get("/sessions").json()["data"][:1] == before


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"headers": {"Content-Type": "application/json"}}, 400, "invalid_request"),
        ({"headers": {"Content-Encoding": "gzip"}}, 400, "unsupported_encoding"),
        ({"base_model": "nobody"}, 404, "unknown_base_model"),
        ({"extra": "1"}, 400, "invalid_request"),
        ({"ttl_seconds": "0"}, 400, "invalid_request"),
        ({"tags": "a b"}, 400, "invalid_request"),
        ({"name": "../up"}, 400, "invalid_request"),
    ],
)
def test_an_import_that_is_asked_for_wrongly_is_refused(
    client: httpx.Client, change: dict[str, Any], status: int, code: str
) -> None:
    refused = imported(client, "refused", b"", **change)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text


def test_importing_needs_the_right_to_train(gateway: Gateway, adapter: bytes) -> None:
    for key, status in ((gateway.keys.inference_only, 403), (gateway.keys.unknown, 401)):
        with gateway.client(key) as somebody:
            assert imported(somebody, "guests", adapter).status_code == status


def test_an_archive_is_refused_before_anything_exists(client: httpx.Client, gateway: Gateway) -> None:
    stored = sorted(path.name for path in gateway.settings.artifact_dir.glob("upload-*"))
    link = tarfile.TarInfo(WEIGHTS_NAME)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"

    refused = imported(client, "guests", link.tobuf() + bytes(1024))

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_archive")
    assert sorted(path.name for path in gateway.settings.artifact_dir.glob("upload-*")) == stored
    assert json.dumps(refused.json()).find("passwd") == -1
