"""Base models and their limits."""

from gateway.wire.native.schemas.base import Read


class BaseModelRead(Read):
    """A base model and its limits."""

    name: str
    context_length: int
    vocab_size: int
    max_lora_rank: int
    dtype: str
    tokenizer_files: list[str]


class BaseModelList(Read):
    data: list[BaseModelRead]
