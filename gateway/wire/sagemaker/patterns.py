"""The models' regular expressions in Python's dialect: letters and digits are ASCII, and ``\\p{L}`` is understood.

Python has no classes of Unicode categories. So a character beyond ASCII is replaced by a stand-in for its category, and
``\\p{L}`` by the ASCII characters of that category and its stand-in.
"""

import re
import unicodedata
from functools import lru_cache

_CATEGORY = re.compile(r"\\p\{([LMNPSZC])\}")
_STAND_INS = {category: chr(0xE000 + index) for index, category in enumerate("LMNPSZC")}


def matches(pattern: str, text: str) -> bool:
    """Say whether the whole ``text`` matches."""
    if _CATEGORY.search(pattern) is not None:
        text = "".join(char if char.isascii() else _STAND_INS[_category(char)] for char in text)
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_CATEGORY.sub(lambda found: _members(found[1]), pattern), re.ASCII)


def _members(category: str) -> str:
    """Return the inside of a character class."""
    return (
        "".join(re.escape(chr(code)) for code in range(128) if _category(chr(code)) == category)
        + (_STAND_INS[category])
    )


def _category(char: str) -> str:
    return unicodedata.category(char)[0]
