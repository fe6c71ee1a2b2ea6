"""What an answer costs: calls of LMs, tokens that they read and write, and FLOP. Pure.

Tokens are those of every prompt as it is put to an LM, its shots too: what a server without a cache of prefixes reads
and bills. An LM that reads a common beginning once, as local weights do, reads far less. Prompts are counted by lines.
FLOP are 2 x parameters x tokens read and written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from replug.answering.factors import Factors
from replug.answering.prompts import AnswerPrompts
from replug.answering.rerankers import Reranker

NumTokens = Callable[[str], int]
FLOP_PER_PARAMETER = 2.0


@dataclass(frozen=True, slots=True)
class AnswerCosts:
    """Of one question: tokens read and written by the LM that answers, and read by the one that reranks."""

    calls: int
    read: int
    written: int
    scored: int = 0

    def numbers(self, parameters: float | None, scorer_parameters: float | None) -> dict[str, float]:
        """By the names of metrics; FLOP where it is known how large the LMs are."""
        told = {
            "lm_calls": float(self.calls),
            "prompt_tokens": float(self.read + self.scored),
            "generated_tokens": float(self.written),
        }
        if parameters is None or scorer_parameters is None:
            return told
        by_lms = (self.read + self.written) * parameters + self.scored * scorer_parameters
        return {**told, "flop": FLOP_PER_PARAMETER * by_lms}


@dataclass(frozen=True, slots=True)
class LineTokens:
    """Tokens of the parts of a question's prompts by one tokenizer: the shots, the question, [P] passages, answers."""

    opening: int
    question: int
    passages: Sequence[int]
    answers: Mapping[str, int]

    def of_factors(self, factors: Factors, reranker: Reranker) -> tuple[int, int]:
        """How many texts are scored for a reranker, and their tokens."""
        before = [self.opening + self.passages[place] for place in range(len(factors.question_alone))]
        if reranker.needs_all_passages:
            answers = [self.answers[answer] for answer in factors.distinct]
            return len(answers) * len(before), sum(p + self.question + a for p in before for a in answers)
        calls, tokens = 0, 0
        for answer, place in zip(factors.answers, factors.passages, strict=True):
            answered = before[place] + self.answers[answer]
            of_each = [answered + self.question, answered + self.question, answered]
            used = [
                name in reranker.factors for name in ("answer_given_question", "question_given_answer", "answer_alone")
            ]
            calls += sum(used)
            tokens += sum(num for num, is_used in zip(of_each, used, strict=True) if is_used)
        if "question_alone" in reranker.factors:
            calls += len(before)
            tokens += sum(before) + self.question * len(before)
        return calls, tokens


class LineCounter:
    """Counts the lines of questions by one tokenizer."""

    def __init__(self, num_tokens: NumTokens, prompts: AnswerPrompts) -> None:
        self._num_tokens, self._prompts, self._form = num_tokens, prompts, prompts.form
        self._openings: dict[bool, int] = {}

    def lines(self, question: str, passages: Sequence[str], answers: Sequence[str]) -> LineTokens:
        return LineTokens(
            self.opening(has_evidence=True),
            self._question(question),
            [self._evidence(text) for text in passages],
            {answer: self.answer(answer) for answer in answers},
        )

    def answer(self, text: str) -> int:
        """With the end of its line."""
        return self._num_tokens(f" {text}\n")

    def opening(self, has_evidence: bool) -> int:
        """Of the shots before a question."""
        if has_evidence not in self._openings:
            self._openings[has_evidence] = self._num_tokens(self._prompts.opening(has_evidence))
        return self._openings[has_evidence]

    def alone(self, question: str, evidence: str | None) -> int:
        """Tokens of a whole prompt that asks closed book, or with one text."""
        told = 0 if evidence is None else self._evidence(evidence)
        return self.opening(evidence is not None) + told + self._question(question)

    def _question(self, text: str) -> int:
        """With the label of the answer: every prompt has both."""
        return self._num_tokens(f"{self._form.question_label}: {text}\n{self._form.answer_label}:")

    def _evidence(self, text: str) -> int:
        return self._num_tokens(f"{self._form.evidence_label}: {text}\n")


def reranked_costs(
    reranker: Reranker, factors: Factors, asked: LineTokens, scored: LineTokens, written: Sequence[int]
) -> AnswerCosts:
    """Of candidates from the passages that the factors are of, of which `written` [P] tokens were sampled; none in
    classification, where nothing is sampled. `scored` are by the tokenizer of the LM that reranks.
    """
    num_passages = len(factors.question_alone)
    calls, tokens = scored.of_factors(factors, reranker)
    if not written:
        return AnswerCosts(calls, 0, 0, tokens)
    read = sum(asked.passages[:num_passages]) + num_passages * (asked.opening + asked.question)
    return AnswerCosts(calls + num_passages, read, sum(written[:num_passages]), tokens)
