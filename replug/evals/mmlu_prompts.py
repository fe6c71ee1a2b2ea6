"""What the LM reads for each question of MMLU under each method, and what goes where it holds fewer tokens.

The last demonstrations are dropped until all prompts of a question fit, as Hendrycks et al.'s code does; only where
none is left is a document cut (`lm.too_long`). All documents of a question stand behind the same demonstrations: the
ensemble is to mix what documents change, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from replug.evals.evidence import Evidence
from replug.evals.mmlu import MmluQuestion, mmlu_opening, mmlu_prompt
from replug.models.prompt import PromptTemplate

ROOM = 4  # tokens kept free for a letter: one in all vocabularies known to us

# By method and subject, the document of each demonstration; None for demonstrations without.
ShotDocuments = Mapping[str, Mapping[str, Sequence[str | None] | None]]


@dataclass(frozen=True, slots=True)
class MmluAsked:
    """The prompts [K] of a question under a method, one for each text, which all begin with `opening`."""

    opening: str
    prompts: tuple[str, ...]
    num_shots: int


class MmluPrompts:
    """`demonstrations` by subject, their documents by method. `counting` knows the LM's limit, `template` may cut."""

    def __init__(
        self,
        template: PromptTemplate,
        counting: PromptTemplate,
        demonstrations: Mapping[str, Sequence[MmluQuestion]],
        documents: ShotDocuments,
    ) -> None:
        self._template, self._counting = template, counting
        self._demonstrations, self._documents = demonstrations, documents

    def of(self, question: MmluQuestion, method: str, evidence: Evidence) -> MmluAsked:
        """Raises UnscorableText where `lm.too_long` allows cutting and a question alone does not fit."""
        subject = question.example.group
        shots, given = self._demonstrations[subject], self._documents[method][subject]
        num = next(num for num in range(len(shots), -1, -1) if num == 0 or self._fit(question, evidence, num, method))
        shots, given = shots[:num], given and given[:num]
        build = partial(mmlu_prompt, question, shots, demonstration_documents=given)
        prompts = [self._template.fit(text, build, ROOM, evidence.is_concatenated) for text in evidence.texts]
        return MmluAsked(mmlu_opening(subject, shots, given), tuple(prompts), num)

    def _fit(self, question: MmluQuestion, evidence: Evidence, num: int, method: str) -> bool:
        subject = question.example.group
        shots, given = self._demonstrations[subject][:num], self._documents[method][subject]
        return all(
            self._counting.holds(mmlu_prompt(question, shots, text, given and given[:num]), ROOM)
            for text in evidence.texts
        )
