from collections.abc import Iterator
from pathlib import Path

import pytest

import loopline
from clients.python.tests.small_gateway import KEY, Network, SmallGateway


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def gateway() -> SmallGateway:
    return SmallGateway()


@pytest.fixture
def network(gateway: SmallGateway) -> Network:
    return Network(gateway)


@pytest.fixture
def service(network: Network, time: Time, tmp_path: Path) -> Iterator[loopline.ServiceClient]:
    retry = loopline.RetryPolicy(
        base_s=1.0, cap_s=8.0, give_up_after_s=60.0, clock=time.clock, sleep=time.sleep, uniform=lambda: 0.5
    )
    with loopline.ServiceClient(
        "http://gateway", KEY, retry=retry, transport=network, cache_dir=tmp_path, max_concurrent_samples=4
    ) as client:
        yield client


@pytest.fixture
def training(service: loopline.ServiceClient) -> loopline.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4)
