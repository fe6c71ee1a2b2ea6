"""How a document and a text are joined for the LM, and what is cut where they are too long together.

The document comes first (REPLUG, section 3.2). What does not fit is cut from the document's end, then from the
context's beginning, and never from the continuation: cut continuations would not be comparable.
"""

import threading

from transformers import PreTrainedTokenizerBase

from models.black_box_lm import UnscorableText
from models.pair_tokens import pair_token_ids


def join_document(document: str, separator: str, context: str) -> str:
    """What the LM reads before the continuation."""
    return f"{document}{separator}{context}"


class PromptTemplate:
    """Builds prefixes. With a tokenizer and a limit, too long inputs are cut and counted; without, left as they are."""

    def __init__(
        self, separator: str, tokenizer: PreTrainedTokenizerBase | None = None, max_tokens: int | None = None
    ) -> None:
        self._separator, self._tokenizer, self._max_tokens = separator, tokenizer, max_tokens
        self._lock = threading.Lock()  # a tokenizer refuses to be used by two threads at once
        self.num_truncated = 0

    def prefix(self, document: str | None, context: str, continuation: str) -> str:
        """The document, the separator and the context; the context alone where there is no document.

        Raises UnscorableText where the continuation alone fills the LM.
        """
        whole = self._join(document, context)
        # A token is at least one byte, so most inputs need not be tokenized to see that they fit.
        if self._max_tokens is None or len((whole + continuation).encode()) + 2 <= self._max_tokens:
            return whole
        with self._lock:
            excess = self._excess(whole, continuation)
            if excess <= 0:
                return whole
            self.num_truncated += 1
            return self._truncate(document, context, continuation, excess)

    def _join(self, document: str | None, context: str) -> str:
        return context if document is None else join_document(document, self._separator, context)

    def _excess(self, prefix: str, continuation: str) -> int:
        """Tokens over the limit."""
        assert self._tokenizer is not None and self._max_tokens is not None
        before, after = pair_token_ids(self._tokenizer, prefix, continuation)
        if len(after) >= self._max_tokens:
            raise UnscorableText(
                f"a continuation has {len(after)} tokens, but the LM holds {self._max_tokens} with at least one before "
                "it: shorten it, or take an LM with a longer context"
            )
        return len(before) + len(after) - self._max_tokens

    def _truncate(self, document: str | None, context: str, continuation: str, excess: int) -> str:
        """Cut until it fits: what is cut may be joined by other tokens than before."""
        while excess > 0:
            if document:
                document = self._cut_end(document, excess) or None  # the separator goes with its last token
            else:
                document = None
                context = self._cut_beginning(context, excess)
            excess = self._excess(self._join(document, context), continuation)
        return self._join(document, context)

    def _cut_end(self, text: str, num_tokens: int) -> str:
        spans = self._spans(text)
        return text[: spans[-num_tokens][0]] if num_tokens < len(spans) else ""

    def _cut_beginning(self, text: str, num_tokens: int) -> str:
        spans = self._spans(text)
        return text[spans[num_tokens - 1][1] :] if num_tokens < len(spans) else ""

    def _spans(self, text: str) -> list[tuple[int, int]]:
        assert self._tokenizer is not None
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = encoded["offset_mapping"]
        return spans
