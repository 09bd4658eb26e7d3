"""POST /v1/responses."""

from fastapi import APIRouter, Response

from gateway.wire.openai.answers import AnswererDep
from gateway.wire.openai.response_schemas import ResponseCreate
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["responses"])


@router.post("/responses")
async def create_response(body: ResponseCreate, answerer: AnswererDep) -> Response:
    """Answer a text or a conversation; nothing is kept, so the next request brings the whole conversation again."""
    return await answerer.answer(body)
