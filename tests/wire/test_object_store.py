"""A gateway whose artefacts are in an object store, and whose own copies get lost."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack import EngineEndpoint
from tests.store.s3 import BUCKET, CREDENTIALS, s3_client, s3_server
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.sagemaker_clients import boto
from tests.wire.training import datum, new_session, run, trained_session


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as served:
        yield served


@pytest.fixture(scope="module")
def stored(
    scripted_engine: EngineEndpoint, endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    env = {
        **CREDENTIALS,
        "LOOPLINE_OBJECT_STORE": f"s3://{BUCKET}/loopline",
        "LOOPLINE_OBJECT_STORE_ENDPOINT": endpoint,
    }
    data_dir = tmp_path_factory.mktemp("object-store") / "data"
    with running_gateway(scripted_engine, data_dir, trainer=True, env=env) as started:
        yield started


def lose_copies(artifact_dir: Path) -> int:
    """Remove every version that is cached; return how many those were. Snapshots come and go by themselves."""
    found = list(artifact_dir.glob("ver-*"))
    for path in found:
        shutil.rmtree(path)
    return len(found)


def test_the_sagemaker_dialect_says_where_in_the_store_files_are(stored: Gateway, endpoint: str) -> None:
    with stored.client() as client:
        session = trained_session(client)
    described = boto(stored, "sagemaker").describe_model_package(
        ModelPackageName=f"arn:aws:sagemaker:us-east-1:000000000000:model-package/{session}/1"
    )
    (container,) = described["InferenceSpecification"]["Containers"]
    bucket, _, prefix = container["ModelDataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
    found = s3_client(endpoint).list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    assert f"{prefix}manifest.json" in {entry["Key"] for entry in found}


def test_versions_live_in_the_store_and_are_brought_where_they_are_read(stored: Gateway, endpoint: str) -> None:
    with stored.client() as client:
        session = trained_session(client)
        state = run(client, session, "save_state")["result"]["version"]
        objects = s3_client(endpoint).list_objects_v2(Bucket=BUCKET)["Contents"]
        ids = [client.get(f"/model_packages/{session}/{number}").json()["id"] for number in (1, 2)]
        assert all(any(f"/{id}-" in entry["Key"] for entry in objects) for id in ids)

        assert lose_copies(stored.settings.artifact_dir) >= 2
        assert client.post(f"/model_packages/{session}/1/verify").json()["passed"]
        assert lose_copies(stored.settings.artifact_dir) == 1
        file = client.get(f"/model_packages/{session}/1/export").json()["files"][0]
        assert lose_copies(stored.settings.artifact_dir) == 1
        assert len(httpx.get(file["url"]).content) == file["size_bytes"]

        lose_copies(stored.settings.artifact_dir)
        other = new_session(client)["id"]
        assert run(client, other, "load_state", version=state, optimizer=True)["result"]["optimizer_step"] == 1
        run(client, other, "forward_backward", data=[datum()])
        run(client, other, "optim_step")
        assert run(client, other, "save_weights")["result"]["optimizer_step"] == 2
