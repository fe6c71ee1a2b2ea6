"""What the LM of `replug ask` reads: evidence, question and answer with shots, or a template of the user's.

What does not fit the LM is cut as in an evaluation: the earliest shots go, then the end of the evidence.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from replug.answering.prompts import (
    LINE_ENDS,
    OWN_SHOTS,
    AnswerPrompts,
    PromptForm,
    Shot,
    fit_shots,
    one_line,
    read_shots,
)
from replug.commands.asking.options import QUESTION, AskOptions
from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate
from replug.web.records import Passage

log = logging.getLogger(__name__)

MARGIN = 8  # tokens by which texts that are joined may have more than each for itself


class EnsemblePrompts(Protocol):
    """What the prompts of an ensemble are built by."""

    def closed(self, question: str) -> str:
        """The prompt without evidence."""
        ...

    def of(self, question: str, passage: Passage) -> str:
        """The prompt with a passage."""
        ...

    def opening(self, has_evidence: bool) -> str:
        """What these prompts begin with, so that it is read once."""
        ...


@dataclass(frozen=True, slots=True)
class TemplatePrompts:
    """The user's template, each document before it, as REPLUG puts them (section 3.2)."""

    template: str
    joining: PromptTemplate

    def closed(self, question: str) -> str:
        return self.joining.prefix(None, self._asked(question), "")

    def of(self, question: str, passage: Passage) -> str:
        return self.joining.prefix(passage.text, self._asked(question), "")

    def opening(self, has_evidence: bool) -> str:
        return ""

    def _asked(self, question: str) -> str:
        return self.template.replace(QUESTION, question)


@dataclass(frozen=True, slots=True)
class FormPrompts:
    """Shots, then evidence, question and answer. `cut` has the texts of passages as they fit, by the whole ones."""

    prompts: AnswerPrompts
    cut: Mapping[str, str]

    @classmethod
    def fitted(
        cls, fitting: "Fitting", shots: Sequence[Shot], question: str, passages: Sequence[Passage]
    ) -> "FormPrompts":
        fitting_passages = fitting.cut(question, passages)
        texts = {whole.text: part.text for whole, part in zip(passages, fitting_passages, strict=True)}
        return cls(fitting.prompts(shots, question, fitting_passages), texts)

    def closed(self, question: str) -> str:
        return self.prompts.ask(question, None)

    def of(self, question: str, passage: Passage) -> str:
        return self.prompts.ask(question, self.cut[passage.text])

    def opening(self, has_evidence: bool) -> str:
        return self.prompts.opening(has_evidence)


def template_prompts(template: str, lm: LMConfig, source: LMSource, max_new_tokens: int) -> TemplatePrompts:
    """Documents are cut so that the answer finds room, where the LM's limit and its tokenizer are known."""
    if source.max_tokens is None or (tokenizer := source.tokenizer()) is None:
        return TemplatePrompts(template, PromptTemplate(lm.separator))
    if source.max_tokens <= max_new_tokens:
        raise UserError(f"--max-new-tokens is {max_new_tokens}; the LM holds {source.max_tokens} tokens in all")
    return TemplatePrompts(template, PromptTemplate(lm.separator, tokenizer, source.max_tokens - max_new_tokens))


def chosen_shots(options: AskOptions) -> Sequence[Shot]:
    """Those of the user's file, or ours."""
    return OWN_SHOTS if options.shots is None else read_shots(options.shots)


class Fitting:
    """How much an LM holds, by its tokenizer. Where one of the two is not known, everything stays as it is."""

    def __init__(self, source: LMSource, max_new_tokens: int) -> None:
        self._tokenizer = source.tokenizer() if source.max_tokens is not None else None
        self._max_tokens, self._max_new_tokens = source.max_tokens, max_new_tokens

    def cut(self, question: str, passages: Sequence[Passage]) -> list[Passage]:
        """Evidence that a prompt without shots holds. Raises UserError for a question that fits no prompt."""
        if self._tokenizer is None or self._max_tokens is None:
            return list(passages)
        bare = AnswerPrompts(PromptForm(), ())
        fit_shots(bare, [(question, "")], self._num_tokens, self._max_tokens, self._max_new_tokens)
        room = self._max_tokens - self._max_new_tokens - LINE_ENDS - MARGIN - self._num_tokens(bare.ask(question, ""))
        texts = [self._beginning(one_line(passage.text), room) for passage in passages]
        num_cut = sum(text != one_line(passage.text) for text, passage in zip(texts, passages, strict=True))
        if num_cut:
            log.warning(f"{num_cut} of {len(passages)} passages were cut at their end: the LM holds no more")
        return [replace(passage, text=text) for text, passage in zip(texts, passages, strict=True)]

    def prompts(self, shots: Sequence[Shot], question: str, passages: Sequence[Passage]) -> AnswerPrompts:
        """With as many shots as fit the longest prompt."""
        whole = AnswerPrompts(PromptForm(), shots)
        if self._tokenizer is None:
            return whole
        asked = [(question, None), *((question, passage.text) for passage in passages)]
        fitted = fit_shots(whole, asked, self._num_tokens, self._max_tokens, self._max_new_tokens)
        if len(fitted.shots) < len(shots):
            log.info(f"the prompts have room for {len(fitted.shots)} of {len(shots)} shots")
        return fitted

    def _num_tokens(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer(text, verbose=False)["input_ids"])

    def _beginning(self, text: str, num_tokens: int) -> str:
        assert self._tokenizer is not None
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = spans["offset_mapping"]
        if len(offsets) <= num_tokens:
            return text
        return text[: offsets[num_tokens - 1][1]] if num_tokens > 0 else ""
