"""Make the LM's prompts from documents and texts, and cut prompts that are too long.

The document comes first (REPLUG, section 3.2), or at its place in the user's template. In a chat the prompt is the
user's message, and the scored text is the assistant's. Too long prompts are cut at the document's end, then at the
context's beginning, and never in the continuation: cut continuations would not be comparable. Documents that
were concatenated with the nearest last are cut from their beginning.
"""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from replug.config.rules import CONTEXT, DOCUMENT
from replug.data.records import Example
from replug.data.tokenizing import FIRST_CHARACTERS, num_bytes
from replug.models.black_box_lm import UnscorableText
from replug.models.pair_tokens import (
    answer_blank,
    chat_text,
    num_tokens,
    pair_token_ids,
    pairs_token_ids,
    token_spans,
    within,
)

PLACES = re.compile(f"({re.escape(DOCUMENT)}|{re.escape(CONTEXT)})")
DOCUMENTS_LINE = re.compile(rf"^[^\n]*{re.escape(DOCUMENT)}[^\n]*(\n([^\S\n]*\n)*|$)", re.MULTILINE)
PROMPT = f"{DOCUMENT}\n{CONTEXT}"
Build = Callable[[str | None], str]  # the prompt with a document, or without


class PromptTemplate:
    """A template of prompts. With a tokenizer and a limit, too long inputs are cut and counted; else left as they are.

    `prompt` has {document} and {context} in it. By default each is on its own line. Without a document, its line
    and the blank lines after it are left out. `is_chat` makes the prompt the message of a chat, by
    the tokenizer's template.

    >>> PromptTemplate().prefix("Basel lies on the Rhine.", "The river is the", " Rhine")
    'Basel lies on the Rhine.\\nThe river is the'
    >>> PromptTemplate(prompt="Help: {document}\\n\\nQuestion: {context}").prefix(None, "Which river?", " Rhine")
    'Question: Which river?'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int | None = None,
        prompt: str | None = None,
        is_chat: bool = False,
    ) -> None:
        assert tokenizer is not None or not is_chat, "a chat is written by the tokenizer's template"
        self._tokenizer: Any = tokenizer
        self.max_tokens = max_tokens if tokenizer is not None else None
        self._prompt, self._is_chat = prompt, is_chat
        whole = prompt or PROMPT
        self._parts = {True: PLACES.split(whole), False: PLACES.split(DOCUMENTS_LINE.sub("", whole))}
        self._lock = threading.Lock()  # a tokenizer refuses to be used by two threads at once
        self.num_truncated = 0

    def fill(self, document: str | None, context: str) -> str:
        """Return the template filled with a document and a context: in a chat, the message."""
        given = {DOCUMENT: document or "", CONTEXT: context}
        return "".join(given.get(part, part) for part in self._parts[document is not None])

    def whole(self, document: str | None, context: str) -> str:
        """Return the whole prompt before the continuation."""
        return self._said(self.fill(document, context))

    def around(self, build: Build) -> Build:
        """Return `build` inside the user's template: an evaluation's own prompt is the context there."""
        if self._prompt is None:
            return lambda document: self._said(build(document))
        return lambda document: self.whole(document, build(None))

    def opening(self, text: str) -> str:
        """Return the common opening of prompts that begin with a text; empty if a template precedes the text."""
        return "" if self._is_chat or self._prompt is not None else text

    def continuation(self, text: str) -> str:
        """Return the scored text: in a chat, the template sets the white space before it."""
        if not self._is_chat or not text.strip():
            return text
        return self._blank + text.lstrip()

    @cached_property
    def _blank(self) -> str:
        return answer_blank(self._tokenizer)

    def _said(self, text: str) -> str:
        if not self._is_chat:
            return text
        return chat_text(self._tokenizer, [{"role": "user", "content": text}])

    def prefix(self, document: str | None, context: str, continuation: str, keep_end: bool = False) -> str:
        """Return `whole`, cut if it does not fit the LM with the continuation.

        `keep_end` cuts the document at its beginning. Raises UnscorableText if the continuation, or the template with
        it, fills the LM.
        """
        whole = self.whole(document, context)
        if self._surely_holds(whole + continuation, 0):
            return whole
        with self._lock:
            context = self._readable(context, keep_end=True)
            document, excess = self._cut_document(
                document, lambda left: self._excess(self.whole(left, context), continuation), keep_end
            )
            while excess > 0:
                if document is None and not context:
                    raise UnscorableText(
                        f"lm.prompt is {excess} tokens too long without any document and context, with a continuation: "
                        f"the LM holds {self.max_tokens}; expected a shorter template"
                    )
                document, context = None, self._cut(context, excess, keep_end=True)
                excess = self._excess(self.whole(document, context), continuation)
            return self.whole(document, context)

    def _cut_document(
        self, document: str | None, count_excess: Callable[[str | None], int], keep_end: bool
    ) -> tuple[str | None, int]:
        """Cut a document until its prompt fits; return the rest of it, and the excess tokens that remain."""
        if document:
            document = self._readable(document, keep_end) or None
        excess = count_excess(document)
        self.num_truncated += excess > 0
        while excess > 0 and document:  # a cut may change the tokens at the joint
            document = self._cut(document, excess, keep_end) or None  # the separator goes with its last token
            excess = count_excess(document)
        return document, excess

    def prefixes(self, parts: Sequence[tuple[str | None, str, str]]) -> list[str]:
        """Return `prefix` of each document, context and continuation.

        Prompts are tokenized, in one call, only if their bytes do not show that they fit.
        """
        wholes = [self.whole(document, context) for document, context, _ in parts]
        rows = [row for row, part in enumerate(parts) if not self._surely_holds(wholes[row], num_bytes(part[2]))]
        if not rows:
            return wholes
        assert self.max_tokens is not None
        near = [row for row in rows if len(wholes[row]) + len(parts[row][2]) <= FIRST_CHARACTERS * self.max_tokens]
        with self._lock:
            pairs = pairs_token_ids(self._tokenizer, [wholes[row] for row in near], [parts[row][2] for row in near])
        fits = {
            row for row, (before, after) in zip(near, pairs, strict=True) if len(before) + len(after) <= self.max_tokens
        }
        for row in rows:
            if row not in fits:
                wholes[row] = self.prefix(*parts[row])
        return wholes

    def prompts(
        self, examples: Sequence[Example], texts: Iterable[Sequence[str | None]]
    ) -> tuple[list[str], list[str]]:
        """Return a prefix and a continuation for each text before each example; None means no document."""
        parts = [
            (text, example.context, example.continuation)
            for example, before in zip(examples, texts, strict=True)
            for text in before
        ]
        return self.prefixes(parts), [self.continuation(continuation) for _, _, continuation in parts]

    @property
    def cuts(self) -> bool:
        """Return whether too long inputs are cut."""
        return self.max_tokens is not None

    def fit(
        self, document: str | None, build: Build, num_after: int, keep_end: bool = False, name: str | None = None
    ) -> str:
        """Return the prompt `build` of the document that `fit_document` returns."""
        return build(self.fit_document(document, build, num_after, keep_end, name))

    def fit_document(
        self, document: str | None, build: Build, num_after: int, keep_end: bool = False, name: str | None = None
    ) -> str | None:
        """Return the document, cut until its prompt by `build` and `num_after` tokens fit the LM.

        Raises UnscorableText with the question's name if they do not fit without a document either.
        """
        if self._surely_holds(build(document), num_after):
            return document
        with self._lock:
            document, excess = self._cut_document(
                document, lambda left: self._excess_of(build(left), num_after), keep_end
            )
        if excess > 0:
            raise UnscorableText(
                f"{'a prompt' if name is None else f'question {name}: its prompt'} is {excess} tokens too long without "
                f"any document: the LM holds {self.max_tokens}, {num_after} of them for the answer; expected a "
                "shorter question"
            )
        return document

    def holds(self, prompt: str, num_after: int) -> bool:
        """Return whether a prompt and `num_after` tokens fit the LM; true if no limit is known."""
        if self._surely_holds(prompt, num_after):
            return True
        with self._lock:
            return self._excess_of(prompt, num_after) <= 0

    def num_tokens(self, prompt: str) -> int:
        """Return the number of tokens in a prompt; the LM's tokenizer must be known."""
        with self._lock:
            return num_tokens(self._tokenizer, prompt)

    def _readable(self, text: str, keep_end: bool) -> str:
        """Return a text up to the first token beyond the limit, without the cost of a much longer text."""
        assert self.max_tokens is not None
        return within(self._tokenizer, text, self.max_tokens + 1, keep_end)

    def _surely_holds(self, prompt: str, num_after: int) -> bool:
        """Return whether the bytes fit: a token has at least one byte, so most prompts need not be tokenized."""
        return self.max_tokens is None or num_bytes(prompt) + 2 + num_after <= self.max_tokens

    def _excess(self, prefix: str, continuation: str) -> int:
        """Return the tokens over the limit."""
        assert self.max_tokens is not None
        before, after = pair_token_ids(self._tokenizer, prefix, self._readable(continuation, keep_end=False))
        if len(after) >= self.max_tokens:
            raise UnscorableText(
                f"a continuation has {len(after)} tokens or more, but the LM holds {self.max_tokens} with at least "
                "one before it: shorten it, or take an LM with a longer context"
            )
        return len(before) + len(after) - self.max_tokens

    def _excess_of(self, prompt: str, num_after: int) -> int:
        assert self.max_tokens is not None
        return num_tokens(self._tokenizer, self._readable(prompt, keep_end=False)) + num_after - self.max_tokens

    def _cut(self, text: str, count: int, keep_end: bool) -> str:
        """Return the text without its last `count` tokens, or with `keep_end` without its first."""
        spans = token_spans(self._tokenizer, text)
        if count >= len(spans):
            return ""
        return text[spans[count - 1][1] :] if keep_end else text[: spans[-count][0]]
