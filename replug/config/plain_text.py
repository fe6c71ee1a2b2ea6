"""Make other people's text safe for a terminal: no character moves the cursor, or hides or reorders others."""

import json
import re
from typing import Any

JOINERS = "\u200c\u200d"  # of letters and of emoji
_SHOWN = re.compile(r"[ -~]*")  # the characters of most text


def plain_line(text: str) -> str:
    """Return the text on one line, with unprintable characters escaped as in Python."""
    return plain_text(" ".join(text.split()))


def plain_text(text: str) -> str:
    """Return the text with unprintable characters escaped; lines and tabs stay."""
    if _SHOWN.fullmatch(text):
        return text
    return "".join(char if char.isprintable() or char in f"\n\t{JOINERS}" else _escaped(char) for char in text)


def plain_json(value: Any) -> str:
    """Return JSON on one line, with unprintable characters escaped as in JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _escaped(char: str) -> str:
    return " " if char.isspace() and ord(char) > 0x9F else char.encode("unicode_escape").decode()
