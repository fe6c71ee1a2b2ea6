"""From a question and its passages to a ranked answer: the one path of the evaluation and of `replug ask`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from replug.answering.candidates import Candidate
from replug.answering.factors import Factors
from replug.answering.prompts import AnswerPrompts
from replug.answering.rerankers import Weights
from replug.models.black_box_lm import AsyncLM
from replug.web.records import Passage


@dataclass(frozen=True, slots=True)
class AnsweringOptions:
    """How candidates are sampled, and which rerankers score them. `labels` are given for classification alone."""

    rerankers: tuple[str, ...] = ("direct", "rag", "noisy_channel", "poe")
    num_samples: int = 4  # of each passage
    num_samples_alone: int = 50  # closed book, and of gold evidence
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 0.8
    seed: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The candidates of a question with their factors, and by reranker the score of each distinct answer."""

    question: str
    passages: tuple[Passage, ...]
    candidates: tuple[Candidate, ...]
    factors: Factors
    scores: Mapping[str, Mapping[str, float]]

    def best(self, reranker: str) -> str:
        """The answer of the largest score; empty where there is no candidate."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AnsweredAlone:
    """An answer without a choice of passages: the likeliest sample or label, and each distinct one's log-prob."""

    answer: str
    logprobs: Mapping[str, float] = field(default_factory=dict)


class Answerer:
    """Asks `lm` for candidates and `scorer`, which may be smaller, for factors. `weights`: fitted ones by reranker."""

    def __init__(
        self,
        lm: AsyncLM,
        prompts: AnswerPrompts,
        options: AnsweringOptions,
        scorer: AsyncLM | None = None,
        weights: Mapping[str, Weights] | None = None,
    ) -> None:
        self._lm, self._prompts, self._options = lm, prompts, options
        self._scorer, self._weights = scorer or lm, weights or {}

    def answer(self, question: str, passages: Sequence[Passage]) -> Answered:
        return self.submit(question, passages)()

    def submit(self, question: str, passages: Sequence[Passage]) -> Callable[[], Answered]:
        """As `answer`, later: candidates are asked for at once, factors when it is called."""
        raise NotImplementedError

    def submit_alone(self, question: str, evidence: str | None) -> Callable[[], AnsweredAlone]:
        """Closed book, or with one text as evidence, such as the gold one."""
        raise NotImplementedError
