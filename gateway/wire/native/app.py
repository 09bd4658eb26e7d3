"""The native sub-application."""

from fastapi import FastAPI

from gateway.wire import downloads
from gateway.wire.native import (
    audit,
    base_models,
    budgets,
    errors,
    estimate,
    logprobs,
    model_packages,
    operations,
    sampling,
    sessions,
    transfers,
    usage,
)

DESCRIPTION = """
The complete surface of Loopline. A training loop opens a session, submits operations (answered at once, run strictly
in order, awaited with `GET /operations/{id}?wait=60`) and samples from the versions it saves.

Send `Authorization: Bearer tml-...`. Unknown fields are refused. Every refusal has one shape:
`{"error": {"code", "message", "kind", "field", "details", "request_id"}}`.
"""


def create_native_app() -> FastAPI:
    """Return the dialect mounted at ``/training/v1``, with its own error handlers and OpenAPI page."""
    app = FastAPI(
        title="Loopline", version="1", description=DESCRIPTION, redirect_slashes=False, strict_content_type=False
    )
    errors.install(app)
    for module in (
        sessions,
        operations,
        sampling,
        logprobs,
        base_models,
        transfers,
        model_packages,
        downloads,
        usage,
        budgets,
        audit,
        estimate,
    ):
        app.include_router(module.router)
    return app
