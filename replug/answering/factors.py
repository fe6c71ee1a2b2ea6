"""Sample candidates for an answer, and score the factors that rerankers combine (Lazaridou et al. 2022, section 3.3).

Four candidates are sampled for each passage, and equal ones of a passage are one. In classification the labels are
every passage's candidates. Factors are natural logarithms of probabilities of whole texts with their end, float64.
p(a|q,p) is that of the LM that answers: a sample's own, which costs nothing, or a label's. The other factors are of the
LM that reranks, which may be smaller.

Letters: C candidates, P passages.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from replug.answering.prompts import AnswerPrompts, ScoredPart
from replug.data.rows import one_line
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import log_softmax
from replug.models.generation import Generated
from replug.web.records import Passage

# In one call: a few passes of a CPU, and work for several replicas. The texts of a call are scored together.
PASSAGES_PER_CALL = 8
# The factors by their names, which are the fields of `Factors`.
ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER = "answer_given_question", "question_given_answer"
ANSWER_ALONE, QUESTION_ALONE, PASSAGE = "answer_alone", "question_alone", "passage"
LOGPROB_TOLERANCE = 1e-3  # by which rounding may lift a log-probability above 0


Reader = tuple[AsyncLM, AnswerPrompts]  # an LM, with prompts that fit it


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer on one line, the number of the passage that it was sampled from, and log p(a|q,p); None of a label."""

    text: str
    passage: int
    logprob: float | None = None


def sampled_candidates(samples: Sequence[Sequence[Generated]]) -> list[Candidate]:
    """Return the distinct answers of each passage [P], in the order they were drawn. Empty answers are left out."""
    return [
        Candidate(text, passage, logprob)
        for passage, drawn in enumerate(samples)
        for text, logprob in logprobs_of_samples(drawn).items()
    ]


def logprobs_of_samples(samples: Sequence[Generated]) -> dict[str, float]:
    """Return each distinct answer with its largest log-probability (nats), in the order they were drawn.

    One text may have been drawn by several sequences of tokens. Empty answers are left out.
    """
    logprobs: dict[str, float] = {}
    for sample in samples:
        if text := one_line(sample.text):
            logprobs[text] = max(sample.sum_logprob, logprobs.get(text, -float("inf")))
    return logprobs


def num_tokens(samples: Sequence[Generated]) -> int:
    """Return the number of tokens of all samples, with the tokens that ended them."""
    return sum(len(sample.token_logprobs) for sample in samples)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one question's candidates.

    `answers` [C] are the candidates' texts, `passages` [C] the numbers of their passages. Raises ValueError for arrays
    of other lengths and for numbers that are not log-probabilities.
    """

    answers: tuple[str, ...]
    passages: np.ndarray  # int64 [C]
    answer_given_question: np.ndarray  # [C] log p(a|q,p)
    question_given_answer: np.ndarray  # [C] log p(q|a,p)
    answer_alone: np.ndarray  # [C] log p(a|p)
    question_alone: np.ndarray  # [P] log p(q|p)
    passage: np.ndarray  # [P] log p_tfidf(p|q), minus infinity for a passage that shares no word with the question

    def __post_init__(self) -> None:
        num_candidates, num_passages = (len(self.answers),), (len(self.passage),)
        shapes = {
            "passages": num_candidates,
            ANSWER_GIVEN_QUESTION: num_candidates,
            QUESTION_GIVEN_ANSWER: num_candidates,
            ANSWER_ALONE: num_candidates,
            QUESTION_ALONE: num_passages,
            PASSAGE: num_passages,
        }
        for name, shape in shapes.items():
            numbers = getattr(self, name)
            if numbers.shape != shape:
                raise ValueError(f"{name} has the shape {numbers.shape}; expected {shape}")
            if name == "passages":
                continue
            if np.isnan(numbers).any() or (numbers > LOGPROB_TOLERANCE).any():
                raise ValueError(f"{name} holds {numbers.tolist()}; expected log-probabilities, 0 or less")
        if any(not 0 <= passage < len(self.passage) for passage in self.passages):
            raise ValueError(f"passages are {self.passages.tolist()}; expected numbers below {len(self.passage)}")

    @property
    def distinct(self) -> tuple[str, ...]:
        """Return the distinct answers, in the order of the candidates."""
        return tuple(dict.fromkeys(self.answers))

    def of_first(self, num_passages: int) -> "Factors":
        """Return the factors as if there were only `num_passages` passages; p_tfidf is a share of their sum."""
        kept = self.passages < num_passages
        answers = tuple(answer for answer, is_kept in zip(self.answers, kept, strict=True) if is_kept)
        return Factors(
            answers,
            self.passages[kept],
            self.answer_given_question[kept],
            self.question_given_answer[kept],
            self.answer_alone[kept],
            self.question_alone[:num_passages],
            _shares(self.passage[:num_passages]),
        )


def submit_factors(
    answering: Reader,
    reranking: Reader,
    question: str,
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
) -> Callable[[], Factors]:
    """Ask for the factors of a question that no sampling gave; the returned function waits for them.

    Errors are those of `AsyncLM.submit`.
    """
    answers = tuple(candidate.text for candidate in candidates)
    values = {name: np.zeros(len(answers)) for name in (ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER, ANSWER_ALONE)}
    values[QUESTION_ALONE] = np.zeros(len(passages))
    calls: list[tuple[list[Asked], Future[list[ContinuationScore]]]] = []
    for start in range(0, len(passages), PASSAGES_PER_CALL):
        numbers = range(start, min(start + PASSAGES_PER_CALL, len(passages)))
        by_lm: dict[tuple[AsyncLM, str], list[Asked]] = {}
        for lm, part in _asked((answering, reranking), question, passages, candidates, numbers):
            by_lm.setdefault((lm, part[2].opening), []).append(part)
        for (lm, opening), together in by_lm.items():
            prefixes, continuations = zip(*((part.prefix, part.continuation) for _, _, part in together), strict=True)
            calls.append((together, lm.submit(prefixes, continuations, opening=opening)))

    def gather() -> Factors:
        for together, scores in calls:
            for (factor, place, _), score in zip(together, scores.result(), strict=True):
                values[factor][place] = score.sum_logprob
        with np.errstate(divide="ignore"):  # a passage that shares no word with the question
            values[PASSAGE] = np.log(np.array([passage.probability for passage in passages], dtype=np.float64))
        for row, candidate in enumerate(candidates):
            if candidate.logprob is not None:
                values[ANSWER_GIVEN_QUESTION][row] = candidate.logprob
        numbers = np.array([candidate.passage for candidate in candidates], dtype=np.int64)
        return Factors(answers, numbers, **values)

    return gather


Asked = tuple[str, tuple[int, ...], ScoredPart]  # a factor, the place of an entry, and the text whose log-prob it is


def _asked(
    readers: Sequence[Reader],
    question: str,
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
    numbers: range,
) -> Iterator[tuple[AsyncLM, Asked]]:
    """Yield what is asked about these passages and their candidates, with the LM of the two that is asked."""
    (answering, asking), (reranking, prompts) = readers
    own = [(row, candidate) for row, candidate in enumerate(candidates) if candidate.passage in numbers]
    for row, candidate in own:
        if candidate.logprob is None:
            part = asking.answer_given_question(candidate.text, question, passages[candidate.passage].text)
            yield answering, (ANSWER_GIVEN_QUESTION, (row,), part)
    for number in numbers:
        yield reranking, (QUESTION_ALONE, (number,), prompts.question_alone(question, passages[number].text))
    for row, candidate in own:
        text, answer = passages[candidate.passage].text, candidate.text
        yield reranking, (QUESTION_GIVEN_ANSWER, (row,), prompts.question_given_answer(question, answer, text))
        yield reranking, (ANSWER_ALONE, (row,), prompts.answer_alone(answer, text))


def normalized_over_labels(factors: Factors) -> Factors:
    """Return the factors of a classification, whose answers' probabilities are shares of the labels in each passage."""
    if not factors.answers:  # no passages
        return factors
    given, alone = factors.answer_given_question.copy(), factors.answer_alone.copy()
    for passage in range(len(factors.passage)):
        mine = factors.passages == passage
        given[mine], alone[mine] = log_softmax(given[mine]), log_softmax(alone[mine])
    return replace(factors, answer_given_question=given, answer_alone=alone)


def _shares(logprobs: np.ndarray) -> np.ndarray:
    """Return log shares of the sum; equal ones if all are 0."""
    if not len(logprobs) or not np.isfinite(logprobs).any():
        return np.full(len(logprobs), -np.log(max(1, len(logprobs))))
    return logprobs - np.logaddexp.reduce(logprobs)
