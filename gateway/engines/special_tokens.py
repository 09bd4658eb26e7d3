"""Special tokens in what tenants write stay text.

An engine tokenises a rendered conversation as a whole, so a turn that holds the text of a special token, such as
``<|im_end|>``, would end itself and begin another. Here such text gets an invisible character (U+2060, word joiner)
after its first one: the tokenizer reads letters then, not the token. Raw prompts of completions are left as they are:
there the caller writes the whole prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

JOINER = "\u2060"
# What most tokenizers call theirs, for a gateway that cannot read the model's files.
_USUAL = r"<\|[^|<>\s]{1,64}\|>|</?s>"


class SpecialTokens:
    """The special tokens of one base model."""

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if len(text) > 1}, key=lambda text: (-len(text), text))
        self._any = re.compile("|".join([*map(re.escape, longest_first), _USUAL]))

    @classmethod
    def of(cls, model: Path) -> "SpecialTokens":
        """Read ``tokenizer.json`` beside the weights; without it the usual spellings count."""
        try:
            document = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls(())
        added: Sequence[Mapping[str, Any]] = document.get("added_tokens") or ()
        return cls([token["content"] for token in added if token.get("special")])

    def as_text(self, text: str) -> str:
        """Return ``text`` with its special tokens broken up."""
        return self._any.sub(lambda found: found[0][0] + JOINER + found[0][1:], text)

    def in_body(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an engine's body with the special tokens in turns, tools and template arguments broken up."""
        changed = {
            name: self._inside(body[name])
            for name in ("messages", "tools", "chat_template_kwargs", "input", "instructions")
            if body.get(name)
        }
        return {**body, **changed}

    def _inside(self, value: Any) -> Any:
        match value:
            case str():
                return self.as_text(value) if self._any.search(value) else value
            case dict():
                return {name: self._inside(inner) for name, inner in cast("dict[str, Any]", value).items()}
            case list():
                return [self._inside(inner) for inner in cast("list[Any]", value)]
            case _:
                return value
