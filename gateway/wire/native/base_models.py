"""The base models there are, and their tokenizers' files."""

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.responses import FileResponse

from gateway.core.catalog import BaseModel
from gateway.core.errors import NotFound
from gateway.wire.deps import Caller, CatalogDep
from gateway.wire.native.schemas.base_models import BaseModelList, BaseModelRead
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["base models"])

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def tokenizer_files(model: BaseModel) -> Sequence[str]:
    """Return which of the public files the model's directory has."""
    return [name for name in TOKENIZER_FILES if (model.path / name).is_file()]


@router.get("/base_models")
async def list_base_models(principal: Caller, catalog: CatalogDep) -> BaseModelList:
    """List the base models that sessions can be opened on."""
    return BaseModelList(
        data=[
            BaseModelRead(
                name=model.name,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                max_lora_rank=model.max_lora_rank,
                dtype=model.dtype,
                tokenizer_files=list(tokenizer_files(model)),
            )
            for _, model in sorted(catalog.models.items())
        ]
    )


@router.get("/base_models/{name:path}/tokenizer/{file}")
async def read_tokenizer_file(name: str, file: str, principal: Caller, catalog: CatalogDep) -> FileResponse:
    """Download one of the files that ``GET /base_models`` lists; no other file can be read."""
    model = catalog.get(name)
    if file not in tokenizer_files(model):
        raise NotFound(f"no such tokenizer file; there are: {', '.join(tokenizer_files(model))}", field="file")
    return FileResponse(model.path / file, filename=file)
