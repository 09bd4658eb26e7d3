"""The Tinker sub-application."""

from fastapi import FastAPI

from gateway.wire import downloads
from gateway.wire.tinker import (
    checkpoints,
    copies,
    errors,
    futures,
    losses,
    runs,
    sampling,
    service,
    training,
    usage,
    weights,
)


def create_tinker_app() -> FastAPI:
    """Return the dialect mounted at ``/tinker``; its routes lie below ``/api/v1``, as the SDK asks for them."""
    app = FastAPI(
        title="Loopline, Tinker dialect",
        version="1",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    errors.install(app)
    for router in (
        service.router,
        losses.router,
        training.router,
        training.turns,
        training.binary_turns,
        weights.turns,
        sampling.router,
        futures.router,
        checkpoints.router,
        copies.router,
        runs.router,
        usage.router,
        downloads.router,
    ):
        app.include_router(router, prefix="/api/v1")
    return app
