"""The base model's own tokenizer: its files come from the gateway, so a client needs no hub and no path."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from loopline._transport import Transport
from loopline.errors import NotFound, ResultMismatchError

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # all they do is said in tokenizer.json


class BaseModelInfo(BaseModel):
    """A base model the gateway trains and serves."""

    name: str
    context_length: int
    vocab_size: int
    max_lora_rank: int
    dtype: str
    tokenizer_files: list[str]


class BaseModels(BaseModel):
    """Answer of ``GET /base_models``."""

    data: list[BaseModelInfo]


def require_transformers() -> None:
    """Check that transformers is there.

    Raises:
        ImportError: it is not; says what to install.
    """
    try:
        import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError("get_tokenizer needs transformers: pip install 'loopline[tokenizer]'") from error


def load(directory: Path) -> Any:
    """Return the transformers tokenizer whose files are in ``directory``."""
    config = directory / "tokenizer_config.json"
    kind = json.loads(config.read_text()).get("tokenizer_class") if config.exists() else None
    if kind in GENERIC and (directory / "tokenizer.json").exists():
        # Importing AutoTokenizer also imports torch and every model: many seconds on a small machine.
        from transformers import PreTrainedTokenizerFast

        return cast("Any", PreTrainedTokenizerFast).from_pretrained(str(directory))
    from transformers import AutoTokenizer

    return cast("Any", AutoTokenizer).from_pretrained(str(directory))


async def download(transport: Transport, base_model: str, cache_dir: Path) -> Path:
    """Fetch the tokenizer files of ``base_model`` and return their directory below ``cache_dir``.

    Files are replaced one by one, each at once, so that processes may share the directory.

    Raises:
        NotFound: the gateway has no such base model.
        ResultMismatchError: a file name would leave the directory.
    """
    during = f"get_tokenizer of {base_model}"
    models = await transport.get(BaseModels, "/base_models", during=during)
    model = next((model for model in models.data if model.name == base_model), None)
    if model is None:
        known = ", ".join(model.name for model in models.data) or "none"
        message = f"no base model {base_model!r}; known: {known}"
        raise NotFound(message, status=404, code="not_found", kind="not_found", field="base_model", during=during)
    digest = hashlib.sha256(f"{transport.base_url}\n{base_model}".encode()).hexdigest()[:16]
    directory = cache_dir / "tokenizers" / digest
    directory.mkdir(parents=True, exist_ok=True)
    for name in model.tokenizer_files:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ResultMismatchError(f"{during}: {name!r} is no file name")
        content = await transport.get_bytes(f"/base_models/{base_model}/tokenizer/{name}", during=during)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(content)
        os.replace(file.name, directory / name)
    return directory
