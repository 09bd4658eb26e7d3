"""Stacks on the two real engines, each shared by this folder's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import EngineEndpoint, Stack, running_stack


@pytest.fixture(scope="package")
def tiny_stack(tiny_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tiny_engine, _directory(tmp_path_factory, "tiny-stack")) as stack:
        yield stack


@pytest.fixture(scope="package")
def smollm_stack(smollm_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(smollm_engine, _directory(tmp_path_factory, "smollm-stack")) as stack:
        yield stack


def _directory(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name)
