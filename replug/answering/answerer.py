"""Sample candidates for an answer, score the factors of each, and rank them (Lazaridou et al. 2022, section 3.3).

The LM samples four candidates for each passage; duplicates within a passage count once. In classification the labels
are the candidates of every passage. Factors are natural logarithms (float64) of the probabilities of whole texts,
including their end. The answering LM gives p(a|q,p): a sample's own probability, at no extra cost, or a label's. It
scores truncated samples again, with an end. The other factors come from the reranking LM, which may be smaller.

A score is a logarithm of any scale: only the order counts. If several passages gave an answer, its score is that of its
best candidate, or their sum if the reranker has `adds`. Weights w are exponents, 1 by default.

    direct         p(a|q,p), of the passage that gave the answer
    rag            the sum of p_tfidf(p|q)^w p(a|q,p)^w over the passages that gave the answer
    noisy_channel  p(q|a,p)^w p(a|p)^w p(a|q,p)^w / p(q|p)^w (Bayes' rule times p(a|q,p), as the paper's footnote)
    poe            the product of experts: p_tfidf(p|q)^w times the noisy channel's

Weights are fitted on the validation part of a set only, by a deterministic coordinate search over a fixed grid. They
maximise the likelihood of right answers, taking scores as log-probabilities up to a constant. A few questions cannot
determine five weights, so below MIN_QUESTIONS all stay 1. An evaluation writes the weights to a JSON file:

    {"format": 1, "lm": ..., "reranker": ..., "methods": {"poe@10": {"weights": {"answer_alone": 0.5, ...}, ...}}}

Letters: C candidates, P passages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from replug.answering.prompts import (
    ANSWER_ALONE,
    ANSWER_GIVEN_QUESTION,
    QUESTION_ALONE,
    QUESTION_GIVEN_ANSWER,
    SCORED,
    STOP,
    AnswerPrompts,
    ScoredPart,
)
from replug.data.rows import one_line
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import log_softmax
from replug.models.generation import Generated, GenerationOptions
from replug.web.passages import Passage

# A few forward passes on a CPU, and work for several replicas. The LM scores the texts of a call together.
PASSAGES_PER_CALL = 8
NUM_SAMPLES, NUM_SAMPLES_ALONE = 4, 50  # for each passage; closed book and with gold evidence
PASSAGE = "passage"
# The names of the factors, which are the fields of `Factors`.
FACTORS = (ANSWER_GIVEN_QUESTION, QUESTION_GIVEN_ANSWER, ANSWER_ALONE, QUESTION_ALONE, PASSAGE)


Reader = tuple[AsyncLM, AnswerPrompts]  # an LM, with prompts that fit it


# An answer on one line, the number of its passage, and log p(a|q,p), None for labels and truncated samples.
Candidate = tuple[str, int, float | None]


def logprobs_of_samples(samples: Sequence[Generated], max_new_tokens: int) -> dict[str, float | None]:
    """Return each distinct answer with its largest log-probability (nats), in the order they were drawn.

    Several token sequences may give the same text. None means that all of them reached `max_new_tokens`: they may lack
    the end of the answer, which the other log-probs include. Empty answers are left out.
    """
    logprobs: dict[str, float | None] = {}
    for sample in samples:
        if text := one_line(sample.text):
            known = logprobs.setdefault(text, None)
            if len(sample.token_logprobs) < max_new_tokens:
                logprobs[text] = sample.sum_logprob if known is None else max(known, sample.sum_logprob)
    return logprobs


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one question's candidates.

    `answers` [C] are the candidates' texts, `passages` [C] the numbers of their passages. Raises ValueError for NaN,
    which would make the order arbitrary.
    """

    answers: tuple[str, ...]
    passages: np.ndarray  # int64 [C]
    answer_given_question: np.ndarray  # [C] log p(a|q,p)
    question_given_answer: np.ndarray  # [C] log p(q|a,p)
    answer_alone: np.ndarray  # [C] log p(a|p)
    question_alone: np.ndarray  # [P] log p(q|p)
    passage: np.ndarray  # [P] log p_tfidf(p|q), minus infinity for a passage that shares no word with the question

    def __post_init__(self) -> None:
        for name in FACTORS:
            if np.isnan(getattr(self, name)).any():
                raise ValueError(f"{name} holds {getattr(self, name).tolist()}; expected log-probabilities")

    @property
    def distinct(self) -> tuple[str, ...]:
        """Return the distinct answers, in the order of the candidates."""
        return tuple(dict.fromkeys(self.answers))

    def of_first(self, num_passages: int) -> "Factors":
        """Return the factors of the first `num_passages` passages, with p_tfidf normalised over them."""
        kept, shares = self.passages < num_passages, self.passage[:num_passages]
        if np.isfinite(shares).any():
            shares = shares - np.logaddexp.reduce(shares)
        else:  # all are 0: use equal shares
            shares = np.full(len(shares), -np.log(max(1, len(shares))))
        answers = tuple(answer for answer, is_kept in zip(self.answers, kept, strict=True) if is_kept)
        return Factors(
            answers,
            self.passages[kept],
            self.answer_given_question[kept],
            self.question_given_answer[kept],
            self.answer_alone[kept],
            self.question_alone[:num_passages],
            shares,
        )


def submit_factors(
    answering: Reader,
    reranking: Reader,
    question: str,
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
) -> Callable[[], Factors]:
    """Request the factors of a question that sampling did not give; the returned function waits for them.

    Raises the errors of `AsyncLM.submit`.
    """
    (lm, asking), (scorer, prompts) = answering, reranking
    texts = [passage.text for passage in passages]
    values = {name: np.zeros(len(passages if name == QUESTION_ALONE else candidates)) for name in SCORED}

    def parts(numbers: range) -> Iterator[tuple[AsyncLM, str, int, ScoredPart]]:
        """Yield the requests for these passages and their candidates: LM, factor, entry, and text to score."""
        own = [(row, *candidate) for row, candidate in enumerate(candidates) if candidate[1] in numbers]
        for row, answer, passage, logprob in own:
            if logprob is None:
                part = asking.part(ANSWER_GIVEN_QUESTION, question, answer, texts[passage])
                yield lm, ANSWER_GIVEN_QUESTION, row, part
        for number in numbers:
            yield scorer, QUESTION_ALONE, number, prompts.part(QUESTION_ALONE, question, "", texts[number])
        for row, answer, passage, _ in own:
            for factor in (QUESTION_GIVEN_ANSWER, ANSWER_ALONE):
                yield scorer, factor, row, prompts.part(factor, question, answer, texts[passage])

    calls: list[tuple[list[tuple[str, int]], Future[list[ContinuationScore]]]] = []
    for start in range(0, len(passages), PASSAGES_PER_CALL):
        together: dict[tuple[AsyncLM, str], list[tuple[str, int, str, str]]] = {}
        for one, factor, place, (opening, prefix, continuation) in parts(
            range(start, min(start + PASSAGES_PER_CALL, len(passages)))
        ):
            together.setdefault((one, opening), []).append((factor, place, prefix, continuation))
        for (one, opening), asked in together.items():
            factors, places, prefixes, continuations = zip(*asked, strict=True)
            future = one.submit(prefixes, continuations, opening=opening)
            calls.append((list(zip(factors, places, strict=True)), future))

    def gather() -> Factors:
        for entries, scores in calls:
            for (factor, place), score in zip(entries, scores.result(), strict=True):
                values[factor][place] = score.sum_logprob
        with np.errstate(divide="ignore"):  # a passage that shares no word with the question
            shares = np.log(np.array([passage.probability for passage in passages], dtype=np.float64))
        for row, (_, _, logprob) in enumerate(candidates):
            if logprob is not None:
                values[ANSWER_GIVEN_QUESTION][row] = logprob
        numbers = np.array([passage for _, passage, _ in candidates], dtype=np.int64)
        return Factors(tuple(answer for answer, _, _ in candidates), numbers, **values, passage=shares)

    return gather


def normalized_over_labels(factors: Factors) -> Factors:
    """Return the factors of a classification, with answer probabilities normalised over the labels of each passage."""
    if not factors.answers:  # no passages
        return factors
    given, alone = factors.answer_given_question.copy(), factors.answer_alone.copy()
    for passage in range(len(factors.passage)):
        mine = factors.passages == passage
        given[mine], alone[mine] = log_softmax(given[mine]), log_softmax(alone[mine])
    return replace(factors, answer_given_question=given, answer_alone=alone)


# Rerankers -----------------------------------------------------------------------------------------------------------

Weights = Mapping[str, float]  # by factor
GradedQuestion = tuple[Factors, Mapping[str, float]]  # and the gain of each answer (exact match or accuracy, 0 to 1)


@dataclass(frozen=True, slots=True)
class Reranker:
    """The product of weighted factors that scores an answer.

    `adds` sums the scores of an answer over its passages instead of taking the best.
    """

    factors: tuple[str, ...]
    adds: bool = False

    @property
    def default_weights(self) -> dict[str, float]:
        return dict.fromkeys(self.factors, 1.0)

    def score(self, factors: Factors, weights: Weights) -> dict[str, float]:
        """Return the score of each distinct answer, in order. A weight of 0 leaves its factor out."""
        scores = np.zeros(len(factors.answers))
        for name in sorted(self.factors, key=lambda name: name == PASSAGE):
            if weights[name]:
                logprobs = weights[name] * getattr(factors, name)
                if name in (QUESTION_ALONE, PASSAGE):
                    logprobs = logprobs[factors.passages]
                scores = scores - logprobs if name == QUESTION_ALONE else scores + logprobs
        rows: dict[str, list[int]] = {}
        for row, answer in enumerate(factors.answers):
            rows.setdefault(answer, []).append(row)
        joined = np.logaddexp.reduce if self.adds else np.max
        return {answer: float(joined(scores[own])) for answer, own in rows.items()}


def best_answer(scores: Mapping[str, float]) -> str:
    """Return the answer with the largest score, the first among equals; empty without answers."""
    return max(scores, key=lambda answer: scores[answer], default="")


_CHANNEL = (QUESTION_GIVEN_ANSWER, ANSWER_ALONE, ANSWER_GIVEN_QUESTION, QUESTION_ALONE)
RERANKERS = {
    "direct": Reranker((ANSWER_GIVEN_QUESTION,)),
    "rag": Reranker((PASSAGE, ANSWER_GIVEN_QUESTION), adds=True),
    "noisy_channel": Reranker(_CHANNEL),
    "poe": Reranker((PASSAGE, *_CHANNEL)),
}


GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
MIN_QUESTIONS = 30
SMALLEST_SHARE = 1e-9  # floor of gains and shares, for finite logarithms
MAX_ROUNDS = 10  # over all factors; a round without a change ends the search


def fit_weights(reranker: Reranker, questions: Sequence[GradedQuestion]) -> tuple[Weights, float, float]:
    """Return the weights that make right answers likeliest, their mean gain, and the mean gain of the default weights.

    The search begins at the defaults and changes one weight at a time. Ties go to the weights closest to the defaults.
    With fewer than MIN_QUESTIONS questions, or a single factor (no weight changes the order), it returns the defaults.
    """
    defaults = reranker.default_weights

    def quality(weights: Weights) -> tuple[float, float]:
        distance = sum(abs(weights[factor] - defaults[factor]) for factor in reranker.factors)
        return _mean_log_share(reranker, questions, weights), -distance

    weights = defaults
    for _ in range(MAX_ROUNDS if len(questions) >= MIN_QUESTIONS and len(defaults) > 1 else 0):
        before = weights
        for factor in reranker.factors:
            values = dict.fromkeys([weights[factor], *GRID])  # max takes the first of equals
            variants = [{**weights, factor: value} for value in values]
            weights = max((variant for variant in variants if any(variant.values())), key=quality)
        if weights == before:
            break
    return weights, _mean_gain(reranker, questions, weights), _mean_gain(reranker, questions, defaults)


def _mean_log_share(reranker: Reranker, questions: Sequence[GradedQuestion], weights: Weights) -> float:
    """Return the mean log of right answers' share of exp(score), over questions with both right and wrong answers.

    It responds to every change of a weight; the best answer changes only for a few questions.
    """
    logs = []
    for factors, gains in questions:
        if min(gains.values(), default=0) < max(gains.values(), default=0):
            scores = reranker.score(factors, weights)
            shares = log_softmax(np.array(list(scores.values())))
            right = np.log([max(gains[answer], SMALLEST_SHARE) for answer in scores])
            logs.append(max(float(np.logaddexp.reduce(shares + right)), np.log(SMALLEST_SHARE)))
    return float(np.mean(logs)) if logs else 0.0


def _mean_gain(reranker: Reranker, questions: Sequence[GradedQuestion], weights: Weights) -> float:
    """Return the mean gain of the best answers; a question without candidates counts as 0."""
    gained = []
    for factors, gains in questions:
        best = best_answer(reranker.score(factors, weights))
        gained.append(gains[best] if best else 0.0)
    return float(np.mean(gained)) if gained else 0.0


class Answerer:
    """Ask `lm` for candidates and log p(a|q,p), and `scorer`, which may be smaller, for the other factors.

    `labels` are the candidates of classification, which replace sampling.
    """

    def __init__(
        self, lm: AsyncLM, scorer: AsyncLM, max_new_tokens: int, seed: int = 0, labels: Sequence[str] = ()
    ) -> None:
        self._lm, self._scorer, self._labels = lm, scorer, labels
        self._sampling = GenerationOptions(max_new_tokens, STOP, temperature=1.0, top_p=0.8, seed=seed)

    def submit(
        self, question: str, passages: Sequence[Passage], prompts: AnswerPrompts, scorer_prompts: AnswerPrompts
    ) -> Callable[[], Callable[[], Factors]]:
        """Request candidates now, and factors when the returned function is called; its result waits for them.

        `scorer_prompts` fit the scorer, which may have a shorter context than the LM. The requests depend on the order
        of the calls only, never on the order of the responses.
        """
        labels: list[Candidate] = [(label, number, None) for number in range(len(passages)) for label in self._labels]
        drawn: Future[list[list[Generated]]] | None = None
        if passages and not labels:
            asked = [prompts.ask(question, passage.text) for passage in passages]
            opening = prompts.opening(has_evidence=True)
            drawn = self._lm.submit_samples(asked, replace(self._sampling, opening=opening, num_samples=NUM_SAMPLES))

        def submit() -> Callable[[], Factors]:
            candidates = labels or [
                (text, number, logprob)
                for number, samples in enumerate(drawn.result() if drawn else ())
                for text, logprob in logprobs_of_samples(samples, self._sampling.max_new_tokens).items()
            ]
            readers = (self._lm, prompts), (self._scorer, scorer_prompts)
            scored = submit_factors(*readers, question, passages, candidates)
            return (lambda: normalized_over_labels(scored())) if labels else scored

        return submit

    def submit_alone(
        self, question: str, evidence: str | None, prompts: AnswerPrompts
    ) -> Callable[[], dict[str, float]]:
        """Ask closed book, or with one text as evidence, such as the gold one.

        Return a function that waits for the log-prob (nats) of each distinct sample, or of each label, normalised over
        the labels. Truncated samples are scored again, with an end.
        """

        def submit(answers: Sequence[str]) -> Callable[[], list[float]]:
            parts = [prompts.part(ANSWER_GIVEN_QUESTION, question, answer, evidence) for answer in answers]
            [opening, *_], prefixes, continuations = zip(*parts, strict=True)
            scores = self._lm.submit(prefixes, continuations, opening=opening)
            return lambda: [score.sum_logprob for score in scores.result()]

        if labels := self._labels:
            scored = submit(labels)
            return lambda: dict(zip(labels, log_softmax(np.array(scored())).tolist(), strict=True))
        opening = prompts.opening(has_evidence=evidence is not None)
        sampling = replace(self._sampling, opening=opening, num_samples=NUM_SAMPLES_ALONE)
        drawn = self._lm.submit_samples([prompts.ask(question, evidence)], sampling)

        def gather() -> dict[str, float]:
            [samples] = drawn.result()
            known = logprobs_of_samples(samples, sampling.max_new_tokens)
            cut = [answer for answer, logprob in known.items() if logprob is None]
            ends = dict(zip(cut, submit(cut)() if cut else (), strict=True))
            return {answer: ends[answer] if of is None else of for answer, of in known.items()}

        return gather
