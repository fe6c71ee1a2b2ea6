"""What an LM says of a question's candidates: the factors that rerankers combine (Lazaridou et al. 2022, section 2.4).

C candidates, P passages, A distinct answers. All are natural logarithms of probabilities of whole texts with their
end, float64. The LM that says them may be smaller than the one that samples.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from replug.answering.candidates import Candidate
from replug.answering.prompts import AnswerPrompts
from replug.models.black_box_lm import AsyncLM
from replug.web.records import Passage


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

    @property
    def distinct(self) -> tuple[str, ...]:
        """The A different answers, in the order of the candidates."""
        return tuple(dict.fromkeys(self.answers))

    def of_first(self, num_passages: int) -> "Factors":
        """As if only the first so many passages had been found."""
        raise NotImplementedError


def submit_factors(
    lm: AsyncLM,
    prompts: AnswerPrompts,
    question: str,
    passages: Sequence[Passage],
    candidates: Sequence[Candidate],
    by_passage: bool = False,
) -> "Future[Factors]":
    """Ask for all factors of a question. `by_passage` asks for `answer_by_passage` too, A x P more scores."""
    raise NotImplementedError


def normalized_over_labels(factors: Factors) -> Factors:
    """Classification: the probabilities of answers are shares of the labels', for each passage."""
    raise NotImplementedError
