"""From a question and its passages to a ranked answer: the one path of the evaluation and of `replug ask`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replug.answering.prompts import STOP, AnswerPrompts
from replug.answering.rerankers import (
    RERANKERS,
    Candidate,
    Factors,
    best_answer,
    logprobs_of_samples,
    normalized_over_labels,
    sampled_candidates,
    submit_factors,
)
from replug.models.black_box_lm import AsyncLM
from replug.models.ensemble import log_softmax
from replug.models.generation import GenerationOptions
from replug.web.records import Passage


@dataclass(frozen=True, slots=True)
class AnsweringOptions:
    """How candidates are sampled, and which rerankers score them. `labels` are for classification only."""

    rerankers: tuple[str, ...] = ("direct", "rag", "noisy_channel", "poe")
    num_samples: int = 4  # of each passage
    num_samples_alone: int = 50  # closed book, and of gold evidence
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 0.8
    seed: int = 0
    labels: tuple[str, ...] = ()

    def sampling(self, num_samples: int, opening: str) -> GenerationOptions:
        return GenerationOptions(
            self.max_new_tokens, STOP, self.temperature, self.top_p, self.seed, opening, num_samples
        )


@dataclass(frozen=True, slots=True)
class Answered:
    """The candidates of a question with their factors, and by reranker the score of each distinct answer."""

    question: str
    passages: tuple[Passage, ...]
    candidates: tuple[Candidate, ...]
    factors: Factors
    scores: Mapping[str, Mapping[str, float]]

    def best(self, reranker: str) -> str:
        """Return the answer of the largest score; empty if there is no candidate."""
        return best_answer(self.scores[reranker])


class Answerer:
    """Ask `lm` for candidates and log p(a|q,p), and `scorer`, which may be smaller, for the other factors.

    `scorer_prompts` fit the scorer, if it holds less than the LM. Factors have weights of 1.
    """

    def __init__(
        self,
        lm: AsyncLM,
        prompts: AnswerPrompts,
        options: AnsweringOptions,
        scorer: AsyncLM | None = None,
        scorer_prompts: AnswerPrompts | None = None,
    ) -> None:
        self._lm, self._prompts, self._options = lm, prompts, options
        self._scorer, self._scorer_prompts = scorer or lm, scorer_prompts or prompts

    def answer(self, question: str, passages: Sequence[Passage]) -> Answered:
        return self.submit(question, passages)()()

    def submit(self, question: str, passages: Sequence[Passage]) -> Callable[[], Callable[[], Answered]]:
        """Ask for candidates at once, for factors when the returned function is called; what that returns waits.

        What is asked follows from the order of the calls, never from which answer came first.
        """
        candidates = self._submit_candidates(question, passages)
        return lambda: self._submit_factors(question, passages, candidates())

    def submit_alone(self, question: str, evidence: str | None) -> Callable[[], dict[str, float]]:
        """Ask closed book, or with one text as evidence, such as the gold one.

        Return a function that waits for the log-prob (nats) of each distinct sample, or of each label, normalised over
        the labels. Samples that were cut before their end are scored with it.
        """
        options, labels, prompts = self._options, self._options.labels, self._prompts

        def submit(answers: Sequence[str]) -> Callable[[], list[float]]:
            parts = [prompts.answer_given_question(answer, question, evidence) for answer in answers]
            pairs = [part.prefix for part in parts], [part.continuation for part in parts]
            scores = self._lm.submit(*pairs, opening=parts[0].opening)
            return lambda: [score.sum_logprob for score in scores.result()]

        if labels:
            scored = submit(labels)
            return lambda: dict(zip(labels, log_softmax(np.array(scored())).tolist(), strict=True))
        opening = prompts.opening(has_evidence=evidence is not None)
        sampling = options.sampling(options.num_samples_alone, opening)
        drawn = self._lm.submit_samples([prompts.ask(question, evidence)], sampling)

        def gather() -> dict[str, float]:
            [samples] = drawn.result()
            known = logprobs_of_samples(samples, options.max_new_tokens)
            cut = [answer for answer, logprob in known.items() if logprob is None]
            ends = dict(zip(cut, submit(cut)() if cut else (), strict=True))
            return {answer: ends[answer] if of is None else of for answer, of in known.items()}

        return gather

    def _submit_candidates(self, question: str, passages: Sequence[Passage]) -> Callable[[], list[Candidate]]:
        """Ask for candidates. Labels are those of every passage."""
        options = self._options
        if options.labels or not passages:
            labels = [Candidate(label, passage) for passage in range(len(passages)) for label in options.labels]
            return lambda: labels
        prompts = [self._prompts.ask(question, passage.text) for passage in passages]
        opening = self._prompts.opening(has_evidence=True)
        drawn = self._lm.submit_samples(prompts, options.sampling(options.num_samples, opening))
        return lambda: sampled_candidates(drawn.result(), options.max_new_tokens)

    def _submit_factors(
        self, question: str, passages: Sequence[Passage], candidates: Sequence[Candidate]
    ) -> Callable[[], Answered]:
        scored = submit_factors(
            (self._lm, self._prompts), (self._scorer, self._scorer_prompts), question, passages, candidates
        )

        def ranked() -> Answered:
            factors = normalized_over_labels(scored()) if self._options.labels else scored()
            rerankers = {name: RERANKERS[name] for name in self._options.rerankers}
            scores = {name: of.score(factors, of.default_weights) for name, of in rerankers.items()}
            return Answered(question, tuple(passages), tuple(candidates), factors, scores)

        return ranked
