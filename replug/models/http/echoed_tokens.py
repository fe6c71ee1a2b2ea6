"""Whether the tokens that a server shows are those whose ids it was sent.

Its scores are then of this text and of no other: answers get mixed up on the way, and a tokenizer may be another
model's. Servers show a token decoded, as the vocabulary has it, or by its id; the blank before a word may be missing,
a part of a character is shown as a broken one, as nothing, or as what it becomes with its neighbours.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"  # how a part of a character is shown


class TokenForms:
    """How the tokens of a tokenizer may be shown."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._known: dict[int, frozenset[str]] = {}

    def first_other(self, ids: list[int], shown: Sequence[object]) -> int | None:
        """The place of the first token that is shown as another; None where all may be those of `ids`."""

        @cache
        def whole() -> str:
            return str(self._tokenizer.decode(ids))

        pairs = enumerate(zip(ids, shown, strict=True))
        return next((place for place, (i, text) in pairs if not self._may_be(i, text, whole)), None)

    def _may_be(self, i: int, shown: object, whole: Callable[[], str]) -> bool:
        if not isinstance(shown, str):
            return False
        forms = self._forms(i)
        if _bare(shown) in forms or (shown == "" and i in self._special):
            return True
        return BROKEN in forms and (BROKEN in shown or shown.strip() in whole())

    def _forms(self, i: int) -> frozenset[str]:
        """BROKEN is one of them where the token alone is no whole characters."""
        if i not in self._known:
            decoded, raw = str(self._tokenizer.decode([i])), str(self._tokenizer.convert_ids_to_tokens(i))
            spaced = raw.replace("\u2581", " ").replace("\u0120", " ")
            forms = {_bare(form) for form in (decoded, raw, spaced)} | {f"token_id:{i}"}
            self._known[i] = frozenset(forms | {BROKEN} if BROKEN in decoded else forms)
        return self._known[i]


def _bare(text: str) -> str:
    return text.removeprefix(" ")
