"""Stacks on the two real engines, each shared by this folder's tests."""

from collections.abc import Iterator

import pytest

from tests.stack import EngineEndpoint, Stack, running_stack


@pytest.fixture(scope="package")
def tiny_stack(tiny_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tiny_engine, tmp_path_factory.mktemp("tiny-stack")) as stack:
        yield stack


@pytest.fixture(scope="package")
def smollm_stack(smollm_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(smollm_engine, tmp_path_factory.mktemp("smollm-stack")) as stack:
        yield stack
