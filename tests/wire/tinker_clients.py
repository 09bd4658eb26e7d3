"""The real ``tinker`` SDK against a test's gateway, and the few things that its tests start with."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tinker
from tinker import types

from tests.wire.gateways import Gateway
from tests.wire.training import BASE

SDK_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*DEPRECATED.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*experimental.*:Warning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # the SDK leaves its first connection open
]


@pytest.fixture(scope="module", autouse=True)
def sdk_is_collected() -> Iterator[None]:
    """Let what the SDK leaves open be found while its warnings are ignored, not in a later module's test."""
    yield
    gc.collect()


@contextmanager
def tinker_service(gateway: Gateway, key: str | None = None, **options: Any) -> Iterator[tinker.ServiceClient]:
    """A program of the owner; it reports its end when the block is left."""
    service = tinker.ServiceClient(
        base_url=f"{gateway.url}/tinker", api_key=gateway.keys.owner if key is None else key, **options
    )
    try:
        yield service
    finally:
        service.close("success").result()


def model_input(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def datum(length: int = 4, token: int = 97) -> types.Datum:
    """Tokens counted upwards from ``token``, each predicting the next with weight 1."""
    return types.Datum(
        model_input=model_input(range(token, token + length)),
        loss_fn_inputs={
            "target_tokens": list(range(token + 1, token + length + 1)),
            "weights": [1.0] * length,
        },
    )


def training_client(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=8, **options).result()
