"""What an LM reads: shots of evidence, question and answer, then what is asked, in the order of each factor.

    Evidence: The Loire flows through Nantes.
    Question: Which river flows through Nantes?
    Answer: The Loire

Blocks are separated by an empty line, and each of their lines is one label (Lazaridou et al. 2022, section 2.2).
A prompt ends after a label, and what follows it begins with a space and ends with the line: `" The Loire\\n"`. So an
answer's probability counts its end, and a long answer is not less likely than its own beginning for nothing.

There are two orders of a block with evidence. The one that answers are sampled from gives p(a|q,p). Where evidence
comes first it gives p(q|p) too. The order evidence, answer, question gives p(a|p) and p(q|a,p). The shots of a factor
are in the order of its block, whole, so factors of one order share their opening, which an LM reads once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replug.configs.errors import UserError

STOP = "\n"  # where an answer ends
BETWEEN_BLOCKS = "\n\n"
EVIDENCE, QUESTION, ANSWER = "evidence", "question", "answer"


@dataclass(frozen=True, slots=True)
class Shot:
    """A question that is answered in the prompt, with gold evidence, or None where there is none to show."""

    question: str
    answer: str
    evidence: str | None = None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The labels of a block's lines, and whether its question stands before its evidence."""

    evidence_label: str = "Evidence"
    question_label: str = "Question"
    answer_label: str = "Answer"
    question_first: bool = False

    def label(self, part: str) -> str:
        return {EVIDENCE: self.evidence_label, QUESTION: self.question_label, ANSWER: self.answer_label}[part]


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """What is scored: `continuation` after `prefix`."""

    prefix: str
    continuation: str


class AnswerPrompts:
    """The prompts of one set of questions: all have the same shots.

    Raises UserError for a shot without evidence where prompts with evidence are built.
    """

    def __init__(self, form: PromptForm, shots: Sequence[Shot]) -> None:
        self.form, self.shots = form, tuple(shots)

    @property
    def opening(self) -> str:
        """What every prompt of `ask` with evidence begins with."""
        return self._opening(self._asked_order)

    @property
    def closed_book_opening(self) -> str:
        return self._opening((QUESTION, ANSWER))

    def ask(self, question: str, evidence: str | None) -> str:
        """What an answer is sampled from: with evidence, or closed book."""
        order = (QUESTION, ANSWER) if evidence is None else self._asked_order
        return self._prefix(order, ANSWER, {QUESTION: question, EVIDENCE: evidence or ""})

    def answer_given_question(self, answer: str, question: str, evidence: str | None) -> ScoredPart:
        """log p(a|q,p), or log p(a|q) closed book."""
        return ScoredPart(self.ask(question, evidence), _line(answer))

    def question_given_answer(self, question: str, answer: str, evidence: str) -> ScoredPart:
        """log p(q|a,p)."""
        given = {EVIDENCE: evidence, ANSWER: answer}
        return ScoredPart(self._prefix((EVIDENCE, ANSWER, QUESTION), QUESTION, given), _line(question))

    def answer_alone(self, answer: str, evidence: str) -> ScoredPart:
        """log p(a|p)."""
        return ScoredPart(self._prefix((EVIDENCE, ANSWER, QUESTION), ANSWER, {EVIDENCE: evidence}), _line(answer))

    def question_alone(self, question: str, evidence: str) -> ScoredPart:
        """log p(q|p)."""
        return ScoredPart(self._prefix((EVIDENCE, QUESTION, ANSWER), QUESTION, {EVIDENCE: evidence}), _line(question))

    @property
    def _asked_order(self) -> tuple[str, ...]:
        return (QUESTION, EVIDENCE, ANSWER) if self.form.question_first else (EVIDENCE, QUESTION, ANSWER)

    def _opening(self, order: tuple[str, ...]) -> str:
        return "".join(self._block(order, shot) + BETWEEN_BLOCKS for shot in self.shots)

    def _block(self, order: tuple[str, ...], shot: Shot) -> str:
        if shot.evidence is None and EVIDENCE in order:
            raise UserError(f"the shot {shot.question!r} has no evidence; expected some for prompts with evidence")
        parts = {EVIDENCE: shot.evidence or "", QUESTION: shot.question, ANSWER: shot.answer}
        return STOP.join(f"{self.form.label(part)}: {one_line(parts[part])}" for part in order)

    def _prefix(self, order: tuple[str, ...], end: str, given: dict[str, str]) -> str:
        """The opening and the block's lines before `end`, whose label is the last thing."""
        before = order[: order.index(end)]
        lines = [f"{self.form.label(part)}: {one_line(given[part])}" for part in before]
        return self._opening(order) + STOP.join([*lines, f"{self.form.label(end)}:"])


def fitting_shots(
    shots: Sequence[Shot],
    asked: Sequence[tuple[str, str | None]],
    form: PromptForm,
    num_tokens: Callable[[str], int],
    room: int,
) -> tuple[Shot, ...]:
    """The shots less the earliest ones, as few as make every prompt of a whole set fit into `room` tokens.

    `asked` are the set's questions, each with the evidence it is asked with; `room` is what the LM holds less the
    answer. Raises UserError where the longest does not fit without shots.
    """
    raise NotImplementedError


def one_line(text: str) -> str:
    """White space of every kind, line ends too, is one space: a line's end is the end of a part."""
    return " ".join(text.split())


def _line(text: str) -> str:
    return f" {one_line(text)}{STOP}"
