"""The SageMaker sub-application."""

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.wire.sagemaker import control, errors
from gateway.wire.sagemaker.passthrough import passthrough_routes
from gateway.wire.sagemaker.polls import Polls
from gateway.wire.sagemaker.runtime import training_routes
from gateway.wire.sagemaker.sampling import sampling_routes


def create_sagemaker_app(openai: ASGIApp) -> FastAPI:
    """Return the dialect mounted at ``/sagemaker``. ``openai`` answers the bodies that are OpenAI's."""
    app = FastAPI(
        title="Loopline, SageMaker dialect",
        version="1",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    errors.install(app)
    polls = Polls()
    for router in (
        control.router,
        *training_routes(polls),
        sampling_routes(polls),
        passthrough_routes(openai),
    ):
        app.include_router(router)
    return app


class AtMount:
    """Takes a request for the mount's own path, which clients write without a slash, to the dialect's root."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope["path"]
        await self._app({**scope, "root_path": root, "path": f"{root}/"}, receive, send)
