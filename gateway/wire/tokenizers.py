"""Where a client finds the tokenizer of a base model."""

from fastapi import Request

from gateway.core.catalog import BaseModel

_LOOPBACK = ("127.0.0.1", "::1")


def tokenizer_of(model: BaseModel, request: Request) -> str:
    """Return a name by which the caller can load the model's tokenizer: on this machine, the model's directory."""
    here = request.client is not None and request.client.host in _LOOPBACK
    return str(model.path) if here and model.path.is_dir() else model.name
