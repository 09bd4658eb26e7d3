"""POST /v1/completions."""

from fastapi import APIRouter, Response

from gateway.wire.openai.answers import AnswererDep
from gateway.wire.openai.schemas import CompletionCreate
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["completions"])


@router.post("/completions")
async def create_completion(body: CompletionCreate, answerer: AnswererDep) -> Response:
    """Continue a text or token ids; ``echo`` with ``max_tokens`` 0 scores them."""
    return await answerer.answer(body)
