"""What every test can ask for."""

from pathlib import Path

import pytest

from tests.engines.fixtures import scripted_engine, smollm_engine, tiny_engine, tiny_process
from tests.tiny_model import cached_tiny_model, smollm_directory


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The two-layer float32 model with SmolLM2's tokenizer."""
    return cached_tiny_model()


@pytest.fixture(scope="session")
def smollm_model() -> Path:
    """SmolLM2-135M-Instruct in bfloat16: a model that really chats."""
    return smollm_directory()


__all__ = ["scripted_engine", "smollm_engine", "smollm_model", "tiny_engine", "tiny_model", "tiny_process"]
