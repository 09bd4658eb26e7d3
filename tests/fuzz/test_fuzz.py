"""A slice of ``make fuzz``: whatever is sent, nothing answers 5xx, hangs, dies, or tells of our insides."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fixtures import scripted_engine
from tests.fuzz import by_schema
from tests.fuzz.campaign import app_of_all, log_faults, run
from tests.stack import EngineEndpoint
from tests.tenancy.routers import operations
from tests.wire.gateways import Gateway, running_gateway

__all__ = ["scripted_engine"]


@pytest.fixture(scope="module")
def gateway(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that nothing may end, and whose log stays sound."""
    with running_gateway(scripted_engine, tmp_path_factory.mktemp("fuzz") / "data", trainer=True) as gateway:
        yield gateway
        assert gateway.process.poll() is None
        assert log_faults(gateway) == []


def test_spoiled_requests_break_nothing(gateway: Gateway, tmp_path: Path) -> None:
    outcome = run(gateway, operations(app_of_all(tmp_path)), count=300, seed=20)
    assert (outcome.broken, outcome.hung, outcome.leaks) == ([], [], [])
    assert outcome.requests == 300
    assert outcome.statuses[400] > 60


def test_cases_made_of_its_schemas_reach_every_operation_and_break_none(gateway: Gateway, tmp_path: Path) -> None:
    app = app_of_all(tmp_path)
    every = operations(app)
    outcome = by_schema.run(gateway, app, every, count=2 * len(every), number=20)
    assert (outcome.broken, outcome.hung, outcome.leaks) == ([], [], [])
    assert outcome.operations == {operation.name for operation in every}
    assert outcome.statuses[200] + outcome.statuses[202] > 40
    assert outcome.statuses[400] > 40
