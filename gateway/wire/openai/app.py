"""The OpenAI sub-application."""

from fastapi import FastAPI

from gateway.wire.openai import chat, completions, errors, models, responses


def create_openai_app() -> FastAPI:
    """Return the dialect mounted at ``/v1``, with its own error handlers and OpenAPI page."""
    app = FastAPI(title="Loopline: OpenAI dialect", version="1", redirect_slashes=False, strict_content_type=False)
    errors.install(app)
    for module in (models, completions, chat, responses):
        app.include_router(module.router)
    return app
