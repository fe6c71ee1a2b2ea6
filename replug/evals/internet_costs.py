"""Count what an answer from passages costs: calls of LMs, tokens, and FLOP.

Tokens are those of every prompt as it is put to an LM, its shots too: what a server without a cache of prefixes reads
and bills. An LM that reads a common beginning once, as local weights do, reads far less. Prompts are counted by lines.
FLOP are 2 x parameters x tokens read and written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from replug.answering.factors import Factors
from replug.answering.prompts import ANSWER, EVIDENCE, QUESTION, AnswerPrompts
from replug.answering.rerankers import Reranker
from replug.models.lm_source import LMSource
from replug.models.pair_tokens import token_spans

NumTokens = Callable[[str], int]
Parameters = tuple[float | None, float | None]  # of the LM that answers and of the one that reranks; None means unknown
FLOP_PER_PARAMETER = 2.0


def cost_numbers(parameters: Parameters, calls: int, read: int, written: int, scored: int = 0) -> dict[str, float]:
    """Return the costs of one question by metric; FLOP only where the sizes of both LMs are known.

    The LM that answers reads and writes tokens, the one that reranks scores tokens.
    """
    numbers = {
        "lm_calls": float(calls),
        "prompt_tokens": float(read + scored),
        "generated_tokens": float(written),
    }
    answering, reranking = parameters
    if answering is None or reranking is None:
        return numbers
    return {**numbers, "flop": FLOP_PER_PARAMETER * ((read + written) * answering + scored * reranking)}


@dataclass(frozen=True, slots=True)
class LineTokens:
    """Tokens of the parts of a question's prompts by one tokenizer: the shots, the question, [P] passages, answers."""

    opening: int
    question: int
    passages: Sequence[int]
    answers: Mapping[str, int]


class LineCounter:
    """Counts the tokens of the lines of prompts by one tokenizer."""

    def __init__(self, num_tokens: NumTokens) -> None:
        self._num_tokens = num_tokens
        self._openings: dict[tuple[AnswerPrompts, bool], int] = {}

    def lines(
        self, prompts: AnswerPrompts, question: str, passages: Sequence[str], answers: Sequence[str]
    ) -> LineTokens:
        return LineTokens(
            self._opening(prompts, has_evidence=True),
            self._question(question),
            [self._evidence(text) for text in passages],
            {answer: self.answer(answer) for answer in answers},
        )

    def answer(self, text: str) -> int:
        """Return the tokens of an answer with the end of its line."""
        return self._num_tokens(f" {text}\n")

    def alone(self, prompts: AnswerPrompts, question: str, evidence: str | None) -> int:
        """Return the tokens of a whole prompt that asks closed book, or with one text."""
        evidence_tokens = 0 if evidence is None else self._evidence(evidence)
        return self._opening(prompts, evidence is not None) + evidence_tokens + self._question(question)

    def _opening(self, prompts: AnswerPrompts, has_evidence: bool) -> int:
        key = prompts, has_evidence
        if key not in self._openings:
            self._openings[key] = self._num_tokens(prompts.opening(has_evidence))
        return self._openings[key]

    def _question(self, text: str) -> int:
        """Return the tokens of a question with the label of the answer: every prompt has both."""
        return self._num_tokens(f"{QUESTION}: {text}\n{ANSWER}:")

    def _evidence(self, text: str) -> int:
        return self._num_tokens(f"{EVIDENCE}: {text}\n")


def reranking_costs(
    reranker: Reranker, factors: Factors, asked: LineTokens, scored: LineTokens, written: Sequence[int]
) -> tuple[int, int, int, int]:
    """Return calls, and tokens read, written and scored, for candidates from the passages that the factors have.

    `written` [P] tokens were sampled from each passage, with their own log-probs; empty in classification, where
    nothing is sampled and the LM that answers reads every label. `asked` and `scored` are by the tokenizers of the LM
    that answers and of the one that reranks.
    """
    num_passages = len(factors.question_alone)
    calls, tokens = _scored(reranker, factors, scored)
    if not written:
        places = zip(factors.answers, factors.passages, strict=True)
        lengths = [asked.passages[place] + asked.answers[answer] for answer, place in places]
        return calls + len(lengths), sum(lengths) + len(lengths) * (asked.opening + asked.question), 0, tokens
    read = sum(asked.passages[:num_passages]) + num_passages * (asked.opening + asked.question)
    return calls + num_passages, read, sum(written[:num_passages]), tokens


def _scored(reranker: Reranker, factors: Factors, lines: LineTokens) -> tuple[int, int]:
    """Return how many texts the LM that reranks scores, and their tokens."""
    before = [lines.opening + lines.passages[place] for place in range(len(factors.question_alone))]
    calls, tokens = 0, 0
    for answer, place in zip(factors.answers, factors.passages, strict=True):
        answered = before[place] + lines.answers[answer]
        lengths = {"question_given_answer": answered + lines.question, "answer_alone": answered}
        used = [length for name, length in lengths.items() if name in reranker.factors]
        calls, tokens = calls + len(used), tokens + sum(used)
    if "question_alone" in reranker.factors:
        calls += len(before)
        tokens += sum(before) + lines.question * len(before)
    return calls, tokens


def token_counter(source: LMSource | None) -> NumTokens | None:
    """Return a function that counts the tokens of a text; None means that the LM's tokenizer is unknown."""
    tokenizer = source.tokenizer() if source else None
    if tokenizer is None:
        return None
    return lambda text: len(token_spans(tokenizer, text))
