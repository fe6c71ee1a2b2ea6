"""Which token a server means by the text that it shows it as.

Servers show a token of an answer decoded, or as `token_id:17` where they can be asked to. Several tokens may be shown
alike: parts of characters, and words with and without the blank before them in some tokenizers. Such a text names none.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from replug.models.http.completions_api import ShownAnswer
from replug.models.http.echoed_tokens import BROKEN
from replug.models.http.top_tokens import TopTokens

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

BY_ID = "token_id:"
UNSURE = f"{BROKEN} "  # at the ends of an answer: a part of a character, and a blank that some decoders drop


class TokenNames:
    """The tokens of a tokenizer by what they are shown as."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.ends = {tokenizer.eos_token_id}

    def decode(self, ids: list[int]) -> str:
        """As local weights decode an answer."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def steps(self, answer: ShownAnswer, num_tops: int) -> list[TopTokens]:
        """Of an answer's tokens, up to the first that is not known for sure; none of tokens that are not its text.

        Tokens by which the server ends an answer are known from then on.
        """
        ids = [self._id(token) for token in answer.tokens]
        known = ids[: ids.index(None)] if None in ids else ids
        whole = [i for i in known if i is not None]
        if len(whole) == len(ids):
            if self.decode(whole).strip(UNSURE) != answer.text.strip(UNSURE):
                return []
            if answer.is_ended and whole and whole[-1] in self._tokenizer.all_special_ids:
                self.ends.add(whole[-1])
        steps: list[TopTokens] = []
        for own, top in zip(whole, answer.tops, strict=False):
            if len(top) < num_tops or own not in (shown := self._by_id(top)):
                break
            steps.append(TopTokens(shown, self._most_of_others(top), own))
        return steps

    def _by_id(self, top: dict[str, float]) -> dict[int, float]:
        named = {self._id(text): logprob for text, logprob in top.items()}
        return {token: logprob for token, logprob in named.items() if token is not None}

    def _most_of_others(self, top: dict[str, float]) -> float:
        """What is shown and not known may be any token."""
        return max(min(top.values()), *(value for text, value in top.items() if self._id(text) is None), -float("inf"))

    def _id(self, text: str) -> int | None:
        number = text.removeprefix(BY_ID)
        return int(number) if text.startswith(BY_ID) and number.isdecimal() else self._ids.get(text)

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        texts = self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])
        ids: dict[str, int | None] = {}
        for i, text in enumerate(texts):
            ids[text] = None if text in ids or BROKEN in text else i
        return ids
