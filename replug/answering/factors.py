"""Candidates, the answers that are ranked, and what an LM says of them: the factors that rerankers combine.

Lazaridou et al. 2022, sections 2.3 and 2.4. Four candidates are sampled for each passage, and equal ones of a passage
are one. In classification the labels are every passage's candidates. Without a choice of passages (closed book, gold
evidence) fifty are sampled and the likeliest is the answer.

C candidates, P passages, A distinct answers. All are natural logarithms of probabilities of whole texts with their
end, float64. The LM that says them may be smaller than the one that samples.

A call of the LM holds several passages in one order of lines: they share the opening, which local weights read once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from replug.answering.prompts import AnswerPrompts, ScoredPart, one_line
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import log_softmax
from replug.models.generation import Generated
from replug.web.records import Passage

# In one call: a few passes of a CPU, and work for several replicas. What is in a call is scored together.
PASSAGES_PER_CALL = 8
# The factors by their names, which are the fields of `Factors`.
ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER = "answer_given_question", "question_given_answer"
ANSWER_ALONE, QUESTION_ALONE, PASSAGE = "answer_alone", "question_alone", "passage"
ANSWER_BY_PASSAGE = "answer_by_passage"
LOGPROB_TOLERANCE = 1e-3  # by which rounding may lift a log-probability above 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer on one line, and the number of the passage it was sampled from; None where there was no passage."""

    text: str
    passage: int | None = None


def sampled_candidates(samples: Sequence[Sequence[Generated]]) -> list[Candidate]:
    """Of every passage [P] its distinct answers, in the order they were drawn. Empty answers are none."""
    return [
        Candidate(text, passage)
        for passage, drawn in enumerate(samples)
        for text in dict.fromkeys(one_line(sample.text) for sample in drawn)
        if text
    ]


def label_candidates(labels: Sequence[str], num_passages: int) -> list[Candidate]:
    """Every label for every passage."""
    return [Candidate(label, passage) for passage in range(num_passages) for label in labels]


def logprobs_of_samples(samples: Sequence[Generated]) -> dict[str, float]:
    """Each distinct answer with its largest log-probability (nats), in the order they were drawn. Empty ones are none.

    One text may have been drawn by several sequences of tokens.
    """
    logprobs: dict[str, float] = {}
    for sample in samples:
        if text := one_line(sample.text):
            logprobs[text] = max(sample.sum_logprob, logprobs.get(text, -float("inf")))
    return logprobs


def num_tokens(samples: Sequence[Generated]) -> int:
    """Count the tokens of all samples, with the tokens that ended them."""
    return sum(len(sample.token_logprobs) for sample in samples)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one question's candidates.

    `answers` [C] are the candidates' texts, `passages` [C] the number of each one's passage. Raises ValueError for
    arrays of other lengths and for numbers that are no log-probabilities.
    """

    answers: tuple[str, ...]
    passages: np.ndarray  # int64 [C]
    answer_given_question: np.ndarray  # [C] log p(a|q,p)
    question_given_answer: np.ndarray  # [C] log p(q|a,p)
    answer_alone: np.ndarray  # [C] log p(a|p)
    question_alone: np.ndarray  # [P] log p(q|p)
    passage: np.ndarray  # [P] log p_tfidf(p|q), minus infinity for a passage that shares no word with the question
    answer_by_passage: np.ndarray | None = None  # [A, P] log p(a|q,p) of each of `distinct` given every passage

    def __post_init__(self) -> None:
        num_candidates, num_passages = (len(self.answers),), (len(self.passage),)
        shapes = {
            "passages": num_candidates,
            ANSWER_GIVEN_QUESTION: num_candidates,
            QUESTION_GIVEN_ANSWER: num_candidates,
            ANSWER_ALONE: num_candidates,
            QUESTION_ALONE: num_passages,
            PASSAGE: num_passages,
            ANSWER_BY_PASSAGE: (len(self.distinct), *num_passages),
        }
        for name, shape in shapes.items():
            _check(name, getattr(self, name), shape)
        if any(not 0 <= passage < len(self.passage) for passage in self.passages):
            raise ValueError(f"passages are {self.passages.tolist()}; expected numbers below {len(self.passage)}")

    @property
    def distinct(self) -> tuple[str, ...]:
        """The A different answers, in the order of the candidates."""
        return tuple(dict.fromkeys(self.answers))

    def of_first(self, num_passages: int) -> "Factors":
        """As if only the first so many passages had been found: p_tfidf is their share of theirs."""
        kept = self.passages < num_passages
        answers = tuple(answer for answer, is_kept in zip(self.answers, kept, strict=True) if is_kept)
        whole = self.answer_by_passage
        rows = [self.distinct.index(answer) for answer in dict.fromkeys(answers)]
        return Factors(
            answers,
            self.passages[kept],
            self.answer_given_question[kept],
            self.question_given_answer[kept],
            self.answer_alone[kept],
            self.question_alone[:num_passages],
            _shares(self.passage[:num_passages]),
            None if whole is None else whole[rows][:, :num_passages],
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """An entry of a factor, by candidate, passage, or both, and the text whose log-prob it is."""

    factor: str
    place: tuple[int, ...]
    part: ScoredPart


def submit_factors(
    lm: AsyncLM,
    prompts: AnswerPrompts,
    question: str,
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
    by_passage: bool = False,
) -> Callable[[], Factors]:
    """Ask for all factors of a question; what is returned waits for them. Errors are those of `AsyncLM.submit`.

    `by_passage` asks for `answer_by_passage` too: A x P more scores. Raises ValueError for a candidate of no passage.
    """
    texts = [passage.text for passage in passages]
    calls: list[tuple[list[_Asked], Future[list[ContinuationScore]]]] = []
    for start in range(0, len(texts), PASSAGES_PER_CALL):
        numbers = range(start, min(start + PASSAGES_PER_CALL, len(texts)))
        asked = [*_own_factors(prompts, question, texts, candidates, numbers)]
        if by_passage:
            asked += _every_answer(prompts, question, texts, candidates, numbers)
        calls += [(some, _submit(lm, some)) for some in _by_opening(asked)]
    return lambda: _gathered(calls, passages, candidates, by_passage)


def normalized_over_labels(factors: Factors) -> Factors:
    """Classification: probabilities of answers are shares of the labels', within each passage.

    Raises ValueError where a passage does not have every label once.
    """
    if not factors.answers:  # no passages
        return factors
    labels = factors.distinct
    whole = factors.answer_by_passage
    own = [factors.passages == passage for passage in range(len(factors.passage))]
    if any(sorted(np.array(factors.answers)[mine]) != sorted(labels) for mine in own):
        raise ValueError(f"the candidates of a passage are not the labels {', '.join(labels)}, each once")
    given, alone = factors.answer_given_question.copy(), factors.answer_alone.copy()
    for mine in own:
        given[mine], alone[mine] = log_softmax(given[mine]), log_softmax(alone[mine])
    return replace(
        factors,
        answer_given_question=given,
        answer_alone=alone,
        answer_by_passage=None if whole is None else log_softmax(whole.T).T,
    )


def _own_factors(
    prompts: AnswerPrompts, question: str, texts: Sequence[str], candidates: Sequence[Candidate], numbers: range
) -> Iterator[_Asked]:
    """What is asked of these passages and the candidates that were sampled from them."""
    for number in numbers:
        yield _Asked(QUESTION_ALONE, (number,), prompts.question_alone(question, texts[number]))
    for row, candidate in enumerate(candidates):
        passage, answer = _passage_of(candidate), candidate.text
        if passage in numbers:
            text = texts[passage]
            yield _Asked(ANSWER_GIVEN_QUESTION, (row,), prompts.answer_given_question(answer, question, text))
            yield _Asked(QUESTION_GIVEN_ANSWER, (row,), prompts.question_given_answer(question, answer, text))
            yield _Asked(ANSWER_ALONE, (row,), prompts.answer_alone(answer, text))


def _every_answer(
    prompts: AnswerPrompts, question: str, texts: Sequence[str], candidates: Sequence[Candidate], numbers: range
) -> Iterator[_Asked]:
    for row, answer in enumerate(dict.fromkeys(candidate.text for candidate in candidates)):
        for number in numbers:
            part = prompts.answer_given_question(answer, question, texts[number])
            yield _Asked(ANSWER_BY_PASSAGE, (row, number), part)


def _by_opening(asked: Iterable[_Asked]) -> list[list[_Asked]]:
    """A call for each opening."""
    calls: dict[str, list[_Asked]] = {}
    for one in asked:
        calls.setdefault(one.part.opening, []).append(one)
    return list(calls.values())


def _submit(lm: AsyncLM, asked: Sequence[_Asked]) -> "Future[list[ContinuationScore]]":
    prefixes, continuations = [one.part.prefix for one in asked], [one.part.continuation for one in asked]
    return lm.submit(prefixes, continuations, opening=asked[0].part.opening)


def _gathered(
    calls: "Sequence[tuple[list[_Asked], Future[list[ContinuationScore]]]]",
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
    by_passage: bool,
) -> Factors:
    answers = tuple(candidate.text for candidate in candidates)
    found = {name: np.zeros(len(answers)) for name in (ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER, ANSWER_ALONE)}
    found[QUESTION_ALONE] = np.zeros(len(passages))
    if by_passage:
        found[ANSWER_BY_PASSAGE] = np.zeros((len(dict.fromkeys(answers)), len(passages)))
    for asked, scores in calls:
        for one, score in zip(asked, scores.result(), strict=True):
            found[one.factor][one.place] = score.sum_logprob
    numbers = np.array([_passage_of(candidate) for candidate in candidates], dtype=np.int64)
    with np.errstate(divide="ignore"):  # a passage that shares no word with the question
        found[PASSAGE] = np.log(np.array([passage.probability for passage in passages], dtype=np.float64))
    return Factors(answers, numbers, **found)


def _passage_of(candidate: Candidate) -> int:
    if candidate.passage is None:
        raise ValueError(f"the candidate {candidate.text!r} is of no passage; expected the number of one")
    return candidate.passage


def _shares(logprobs: np.ndarray) -> np.ndarray:
    """Log shares of what these hold together; even where they hold nothing."""
    if not len(logprobs) or not np.isfinite(logprobs).any():
        return np.full(len(logprobs), -np.log(max(1, len(logprobs))))
    return logprobs - np.logaddexp.reduce(logprobs)


def _check(name: str, numbers: np.ndarray | None, shape: tuple[int, ...]) -> None:
    if numbers is None:
        return
    if numbers.shape != shape:
        raise ValueError(f"{name} has the shape {numbers.shape}; expected {shape}")
    if name != "passages" and (np.isnan(numbers).any() or (numbers > LOGPROB_TOLERANCE).any()):
        raise ValueError(f"{name} holds {numbers.tolist()}; expected log-probabilities, 0 or less")
