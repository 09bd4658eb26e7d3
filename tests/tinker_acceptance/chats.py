"""The files that recipes read: the chats of the learning-curve tests, in the cookbook's formats."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.curves import tasks
from tests.tinker_acceptance.place import RENDERER, Options, Place

MAX_LENGTH = 256  # tokens


def conversations(path: Path, count: int) -> Path:
    """Write ``count`` chats, one a line."""
    return _write(path, [{"messages": _messages(chat)} for chat in tasks.chats()[:count]])


def comparisons(path: Path, count: int) -> Path:
    """Write ``count`` questions, each with its own answer, which is preferred, and another question's."""
    chats = tasks.chats()[:count]
    rows = [
        {
            "comparison": {
                "prompt_conversation": _messages(chat)[:1],
                "completion_A": _messages(chat)[1:],
                "completion_B": _messages(other)[1:],
            },
            "label": "A",
        }
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]
    return _write(path, rows)


def common_config(place: Place, where: str, batch_size: int) -> Options:
    """Return the options that every builder of chats has, under its name."""
    common = f"{where}.common_config"
    return {
        f"{common}.model_name_for_tokenizer": place.model,
        f"{common}.renderer_name": RENDERER,
        f"{common}.max_length": MAX_LENGTH,
        f"{common}.batch_size": batch_size,
    }


def _messages(chat: tuple[str, str]) -> list[dict[str, str]]:
    question, answer = chat
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
