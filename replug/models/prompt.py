"""Join a document and a text for the LM, and cut them where they are too long together.

The document comes first (REPLUG, section 3.2). What does not fit is cut from the document's end, then from the
context's beginning, and never from the continuation: cut continuations would not be comparable. Documents that were
concatenated with the nearest last are cut from their beginning.
"""

import threading
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from replug.models.black_box_lm import UnscorableText
from replug.models.pair_tokens import num_tokens, pair_token_ids, token_spans, within


def join_document(document: str, separator: str, context: str) -> str:
    """Return the text that the LM reads before the continuation."""
    return f"{document}{separator}{context}"


class PromptTemplate:
    """Builds prefixes. With a tokenizer and a limit, too long inputs are cut and counted; without, left as they are.

    >>> PromptTemplate("\\n").prefix("Basel lies on the Rhine.", "The river is the", " Rhine")
    'Basel lies on the Rhine.\\nThe river is the'
    """

    def __init__(
        self, separator: str, tokenizer: PreTrainedTokenizerBase | None = None, max_tokens: int | None = None
    ) -> None:
        self._separator, self._tokenizer, self._max_tokens = separator, tokenizer, max_tokens
        self._lock = threading.Lock()  # a tokenizer refuses to be used by two threads at once
        self.num_truncated = 0

    def prefix(self, document: str | None, context: str, continuation: str, keep_end: bool = False) -> str:
        """Return the document, the separator and the context; the context alone without a document.

        `keep_end` cuts the document's beginning first. Raises UnscorableText where the continuation alone fills the LM.
        """
        whole = self._join(document, context)
        if self._surely_holds(whole + continuation, 0):
            return whole
        with self._lock:
            if document:
                document = self._readable(document, keep_end) or None
            context = self._readable(context, keep_end=True)
            excess = self._excess(self._join(document, context), continuation)
            self.num_truncated += excess > 0
            while excess > 0:  # until it fits: what is cut may be joined by other tokens than before
                if document:
                    document = self._cut(document, excess, keep_end) or None  # the separator goes with its last token
                else:
                    document = None
                    context = self._cut(context, excess, keep_end=True)
                excess = self._excess(self._join(document, context), continuation)
            return self._join(document, context)

    def fit(
        self, document: str | None, build: Callable[[str | None], str], num_after: int, keep_end: bool = False
    ) -> str:
        """Return what `build` makes of the document, cut where the prompt and `num_after` tokens would not fit.

        Raises UnscorableText where they do not fit without a document either.
        """
        whole = build(document)
        if self._surely_holds(whole, num_after):
            return whole
        with self._lock:
            if document:
                document = self._readable(document, keep_end) or None
            whole = build(document)
            excess = self._excess_of(whole, num_after)
            self.num_truncated += excess > 0
            while excess > 0 and document:
                document = self._cut(document, excess, keep_end) or None
                whole = build(document)
                excess = self._excess_of(whole, num_after)
        if excess > 0:
            raise UnscorableText(
                f"a prompt is {excess} tokens too long without any document: the LM holds {self._max_tokens}, "
                f"{num_after} of them for the answer; expected fewer demonstrations (questions.shots), or "
                "demonstrations without documents (questions.documents_in_shots=false)"
            )
        return whole

    def holds(self, prompt: str, num_after: int) -> bool:
        """Return whether a prompt and `num_after` tokens fit the LM; yes where no limit is known."""
        if self._surely_holds(prompt, num_after):
            return True
        with self._lock:
            return self._excess_of(prompt, num_after) <= 0

    def _readable(self, text: str, keep_end: bool) -> str:
        """Return a text up to the first token that the LM does not hold, for the cost of what is left."""
        assert self._tokenizer is not None and self._max_tokens is not None
        return within(self._tokenizer, text, self._max_tokens + 1, keep_end)

    def _surely_holds(self, prompt: str, num_after: int) -> bool:
        """Return whether the bytes fit: a token has at least one, so most prompts need not be tokenized."""
        return self._max_tokens is None or len(prompt.encode()) + 2 + num_after <= self._max_tokens

    def _join(self, document: str | None, context: str) -> str:
        return context if document is None else join_document(document, self._separator, context)

    def _excess(self, prefix: str, continuation: str) -> int:
        """Return the tokens over the limit."""
        assert self._tokenizer is not None and self._max_tokens is not None
        before, after = pair_token_ids(self._tokenizer, prefix, self._readable(continuation, keep_end=False))
        if len(after) >= self._max_tokens:
            raise UnscorableText(
                f"a continuation has {len(after)} tokens or more, but the LM holds {self._max_tokens} with at least "
                "one before it: shorten it, or take an LM with a longer context"
            )
        return len(before) + len(after) - self._max_tokens

    def _excess_of(self, prompt: str, num_after: int) -> int:
        assert self._tokenizer is not None and self._max_tokens is not None
        return num_tokens(self._tokenizer, self._readable(prompt, keep_end=False)) + num_after - self._max_tokens

    def _cut(self, text: str, count: int, keep_end: bool) -> str:
        """Return the text without its last `count` tokens, or with `keep_end` without its first."""
        assert self._tokenizer is not None
        spans = token_spans(self._tokenizer, text)
        if count >= len(spans):
            return ""
        return text[spans[count - 1][1] :] if keep_end else text[: spans[-count][0]]
