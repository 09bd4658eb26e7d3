from collections.abc import Iterator

import httpx
import pytest

from tests.engines.fixtures import scripted_engine
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import new_session, trained_session

__all__ = ["scripted_engine"]


@pytest.fixture(scope="session")
def gateway(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(scripted_engine, tmp_path_factory.mktemp("wire") / "data", trainer=True) as started:
        yield started


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    """The owner's client of the native dialect."""
    with gateway.client() as client:
        yield client


@pytest.fixture
def openai_client(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.openai_client() as client:
        yield client


@pytest.fixture
def session(client: httpx.Client) -> str:
    """A fresh session on the base model that is trained."""
    return new_session(client)["id"]


@pytest.fixture(scope="session")
def published(gateway: Gateway) -> str:
    """A session with one step and one published version; tests sample it and leave it as it is."""
    with gateway.client() as client:
        return trained_session(client)
