"""A slice of ``make fuzz``: whatever is sent, nothing answers 5xx, hangs, dies, or tells of our insides."""

from pathlib import Path

from tests.engines.fixtures import scripted_engine
from tests.fuzz.campaign import every_operation, log_faults, run
from tests.stack import EngineEndpoint
from tests.wire.gateways import running_gateway

__all__ = ["scripted_engine"]


def test_spoiled_requests_break_nothing(scripted_engine: EngineEndpoint, tmp_path: Path) -> None:
    every = every_operation(tmp_path)
    with running_gateway(scripted_engine, tmp_path / "data", trainer=True) as gateway:
        outcome = run(gateway, every, count=300, seed=20)
        assert gateway.process.poll() is None
        assert log_faults(gateway) == []
    assert (outcome.broken, outcome.hung, outcome.leaks) == ([], [], [])
    assert outcome.requests == 300
    assert outcome.statuses[400] > 60
