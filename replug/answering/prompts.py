"""Build prompts: shots of evidence, question and answer, then the query, in the order of each factor.

    Evidence: The Loire flows through Nantes.
    Question: Which river flows through Nantes?
    Answer: The Loire

An empty line separates blocks, and each line of a block has one label (Lazaridou et al. 2022, section 3.2). A prompt
ends after a label. Its continuation begins with a space and ends with the line, `" The Loire\\n"`, so an answer's
probability includes its end. Shots have the same line order as the block of the factor, so factors with the same order
share an opening, which the LM reads once. The order evidence, question, answer also gives p(q|p); evidence, answer,
question gives p(a|p) and p(q|a,p).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from replug.config.errors import UserError
from replug.data.rows import one_line, read_rows

if TYPE_CHECKING:  # seconds to import
    from replug.models.prompt import PromptTemplate

STOP = "\n"  # where an answer ends
BETWEEN_BLOCKS = "\n\n"
EVIDENCE, QUESTION, ANSWER = "Evidence", "Question", "Answer"  # the labels of lines

Order = tuple[str, ...]  # of a block's lines
CLOSED_BOOK: Order = (QUESTION, ANSWER)
EVIDENCE_FIRST: Order = (EVIDENCE, QUESTION, ANSWER)
ANSWER_FIRST: Order = (EVIDENCE, ANSWER, QUESTION)
# The factors log p(a|q,p), p(q|a,p), p(a|p) and p(q|p): the order of lines, and the scored line.
ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER = "answer_given_question", "question_given_answer"
ANSWER_ALONE, QUESTION_ALONE = "answer_alone", "question_alone"
SCORED: dict[str, tuple[Order, str]] = {
    ANSWER_GIVEN_QUESTION: (EVIDENCE_FIRST, ANSWER),
    QUESTION_GIVEN_ANSWER: (ANSWER_FIRST, QUESTION),
    ANSWER_ALONE: (ANSWER_FIRST, ANSWER),
    QUESTION_ALONE: (EVIDENCE_FIRST, QUESTION),
}
ScoredPart = tuple[str, str, str]  # an opening, a prefix that begins with it, and the continuation to score
LINE_ENDS = 2  # tokens of the line ends after a question and an answer
AnyShot = TypeVar("AnyShot")


@dataclass(frozen=True, slots=True)
class Shot:
    """A question with its answer, and gold evidence or None."""

    question: str
    answer: str
    evidence: str | None = None


class AnswerPrompts:
    """Build the prompts of questions that share their shots.

    Raises UserError for a shot without evidence if a prompt has evidence.
    """

    def __init__(self, shots: Sequence[Shot]) -> None:
        self.shots = tuple(shots)
        self._openings: dict[Order, str] = {}

    def opening(self, has_evidence: bool) -> str:
        """Return the shots, the opening of the prompts of `ask`."""
        return self._opening(EVIDENCE_FIRST if has_evidence else CLOSED_BOOK)

    def ask(self, question: str, evidence: str | None) -> str:
        """Return the prompt for sampling an answer, with evidence or closed book."""
        return self.part(ANSWER_GIVEN_QUESTION, question, "", evidence)[1]

    def part(self, factor: str, question: str, answer: str, evidence: str | None) -> ScoredPart:
        """Return the texts for scoring a factor; without evidence log p(a|q), closed book."""
        order, end = (CLOSED_BOOK, ANSWER) if evidence is None else SCORED[factor]
        opening, given = self._opening(order), {QUESTION: question, ANSWER: answer, EVIDENCE: evidence or ""}
        lines = [f"{label}: {one_line(given[label])}" for label in order[: order.index(end)]]
        return opening, opening + STOP.join([*lines, f"{end}:"]), f" {one_line(given[end])}{STOP}"

    def openings(self, has_evidence: bool) -> list[str]:
        """Return the openings of all orders in use: closed book, or with evidence and its factors."""
        return [self._opening(order) for order in ((EVIDENCE_FIRST, ANSWER_FIRST) if has_evidence else (CLOSED_BOOK,))]

    def _opening(self, order: Order) -> str:
        if order not in self._openings:
            self._openings[order] = "".join(self._block(order, shot) + BETWEEN_BLOCKS for shot in self.shots)
        return self._openings[order]

    def _block(self, order: Order, shot: Shot) -> str:
        if shot.evidence is None and EVIDENCE in order:
            raise UserError(f"the shot {shot.question!r} has no evidence; expected some for prompts with evidence")
        parts = {EVIDENCE: shot.evidence or "", QUESTION: shot.question, ANSWER: shot.answer}
        return STOP.join(f"{part}: {one_line(parts[part])}" for part in order)


def fit_shots(shots: Sequence[AnyShot], fits: Callable[[Sequence[AnyShot]], bool]) -> Sequence[AnyShot]:
    """Return the last shots that fit into a question's prompts beside its whole evidence.

    `fits` returns whether all prompts fit with the given shots. If no number of them fits, the result is empty:
    the caller cuts the evidence or refuses the question.
    """
    if fits(shots):
        return shots
    first = bisect_left(range(len(shots)), True, lo=min(1, len(shots)), key=lambda first: fits(shots[first:]))
    return shots[first:]


class FittingPrompts:
    """Build prompts for one LM with the shots that fit beside each question, the same in every order of a block.

    `counting` knows the LM's token limit; `max_new_tokens` are reserved for the answer. For an LM of unknown tokenizer
    or limit all shots are kept, and the LM refuses prompts that are too long.
    """

    def __init__(self, whole: AnswerPrompts, counting: "PromptTemplate", max_new_tokens: int) -> None:
        self._whole, self._counting, self._num_after = whole, counting, max_new_tokens + LINE_ENDS
        self._by_shots = {len(whole.shots): whole}  # prompts with equal shots share their openings
        self._fitted: dict[tuple[str | None, ...], AnswerPrompts] = {}

    def of(self, question: str, texts: Sequence[str | None]) -> AnswerPrompts:
        """Return the prompts of a question with these texts as evidence, None for closed book.

        Raises UserError if one does not fit without shots.
        """
        key = question, *texts
        if key not in self._fitted:
            kept = self._kept(question, texts)
            self._fitted[key] = self._by_shots.setdefault(len(kept), AnswerPrompts(kept))
        return self._fitted[key]

    def num_dropped(self, prompts: AnswerPrompts) -> int:
        """Return the number of shots missing from these prompts."""
        return len(self._whole.shots) - len(prompts.shots)

    def _kept(self, question: str, texts: Sequence[str | None]) -> Sequence[Shot]:
        bare = AnswerPrompts(())
        blocks = [(bare.ask(question, text), text is not None) for text in texts]

        def fits(shots: Sequence[Shot]) -> bool:
            fewer = AnswerPrompts(shots)
            return all(
                self._counting.holds(opening + block, self._num_after)
                for block, has_evidence in blocks
                for opening in fewer.openings(has_evidence)
            )

        kept = fit_shots(self._whole.shots, fits)
        if not kept and not fits(()):
            long = next(block for block, _ in blocks if not self._counting.holds(block, self._num_after))
            raise UserError(
                f"the prompt of {question!r} has {self._counting.num_tokens(long)} tokens without shots, and the LM "
                f"holds {self._counting.max_tokens}, {self._num_after} of them for the answer; expected shorter "
                "evidence, or an LM with a longer context"
            )
        return kept


OWN_SHOTS = Path(__file__).with_name("shots.jsonl")  # of `replug ask`


def read_shots(path: Path) -> list[Shot]:
    return [Shot(**row) for _, row in read_rows(path)]
