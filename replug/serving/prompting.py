"""What the LM reads of a request: a prompt or a chat, with each document before it, as much of that as fits.

A chat's document stands before the user's last message, within it: the LM's template begins with what its chats begin
with. What does not fit is cut from the document's end, never from what was asked, and the answer says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from replug.models.black_box_lm import Mixture
from replug.models.ensemble import document_weights
from replug.models.prompt import PromptTemplate, join_document
from replug.serving.errors import ApiError, refused
from replug.serving.requests import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from replug.index_workers.local_index import FoundDocument

Build = Callable[[str | None], str]  # the prompt with a document, or without


@dataclass(frozen=True, slots=True)
class PromptedMixture:
    """Prompts of an ensemble, and of which documents something was cut."""

    mixture: Mixture
    are_cut: tuple[bool, ...]


class Prompting:
    """How an LM is asked. Without its tokenizer nothing is counted, cut, or chatted."""

    def __init__(self, separator: str, tokenizer: "PreTrainedTokenizerBase | None", max_tokens: int | None) -> None:
        self._separator, self._tokenizer, self._max_tokens = separator, tokenizer, max_tokens
        self._template = PromptTemplate(separator, tokenizer, None if tokenizer is None else max_tokens)
        # A template writes the token that begins a text, which such a tokenizer would add once more.
        self._start = _start_that_is_added(tokenizer) if tokenizer is not None else ""

    def of_text(self, prompt: str) -> Build:
        return lambda document: prompt if document is None else join_document(document, self._separator, prompt)

    def of_chat(self, messages: Sequence[Message]) -> Build:
        """Raises ApiError for an LM that has no template, and for messages that the template does not take."""
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise ApiError(
                400,
                "the LM has no chat template (an LM behind a server: give lm.tokenizer); expected /v1/completions",
                code="no_chat_template",
            )
        if messages[-1].role != "user":
            raise refused("messages", f"the last is the {messages[-1].role}'s; expected the user's")
        rows = [{"role": "system" if one.role == "developer" else one.role, "content": one.text} for one in messages]
        return lambda document: self._chat(rows, document)

    def _chat(self, rows: list[dict[str, str]], document: str | None) -> str:
        assert self._tokenizer is not None
        last = rows[-1]["content"]
        asked = last if document is None else join_document(document, self._separator, last)
        chat = [*rows[:-1], {"role": "user", "content": asked}]
        try:
            text = str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise refused("messages", f"the LM's chat template does not take them: {error}") from error
        return text.removeprefix(self._start)

    def require_fits(self, build: Build, num_new: int) -> None:
        """Raise ApiError where prompt and answer are too long without any document."""
        if not self._template.holds(build(None), num_new):
            raise ApiError(
                400,
                f"the prompt and max_tokens={num_new} are more than {self._max_tokens} tokens; expected less",
                code="context_length_exceeded",
            )

    def mixture(
        self, build: Build, documents: "Sequence[FoundDocument]", temperature: float, num_new: int
    ) -> PromptedMixture:
        """Of a prompt that fits."""
        if not documents:
            return PromptedMixture(Mixture([build(None)], [1.0]), ())
        texts = [one.document.text for one in documents]
        prompts = [self._template.fit(text, build, num_new) for text in texts]
        are_cut = tuple(prompt != build(text) for prompt, text in zip(prompts, texts, strict=True))
        weights = document_weights([one.similarity for one in documents], temperature).tolist()
        return PromptedMixture(Mixture(prompts, weights), are_cut)


def _start_that_is_added(tokenizer: "PreTrainedTokenizerBase") -> str:
    begins = tokenizer("x")["input_ids"][:1]
    return str(tokenizer.bos_token) if tokenizer.bos_token and begins == [tokenizer.bos_token_id] else ""
