"""Texts that a caller hands in: a list of strings. A string is a sequence of strings too, so Python would take
`generate("one prompt")` for as many prompts as it has letters, and answer each.
"""

from collections.abc import Sequence

import numpy as np

from replug.config.errors import UserError

SHOWN_CHARACTERS = 40


def require_texts(texts: Sequence[str], what: str) -> None:
    """Raise UserError for one text instead of a list of them, and for what is no text in a list; `what` are plural."""
    if isinstance(texts, str | bytes):
        raise UserError(f"expected a list of {what}, found the text {_shown(texts)}; write [text]")
    if not isinstance(texts, Sequence | np.ndarray):
        raise UserError(f"expected a list of {what}, found a {type(texts).__name__}; write list(...), in an order")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{what}[{place}] is {_shown(text)}; expected a string, found {type(text).__name__}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
