"""POST /v1/chat/completions."""

from fastapi import APIRouter, Response

from gateway.wire.openai.answers import AnswererDep
from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["chat"])


@router.post("/chat/completions")
async def create_chat_completion(body: ChatCreate, answerer: AnswererDep) -> Response:
    """Answer a conversation with a base model, a live session's latest version, or a version ``group@n``."""
    return await answerer.answer(body)
