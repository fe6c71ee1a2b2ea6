"""The LM's scores of a split's candidates, as rows of the labels' table.

Texts are scored in calls of a fixed number, counted from the first, so what is scored together follows from the set and
the candidates alone, also after kill -9: the score cache has what was computed, and no pair is computed twice.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from replug.cluster.interruption import wait_for
from replug.data.labels import GIVERS, text_columns
from replug.data.progress import Progress
from replug.data.records import Window
from replug.data.store import CorpusStore, WindowStore
from replug.models.black_box_lm import ContinuationScore, ScoreSum
from replug.models.caching_lm import CachingLM
from replug.models.prompt import PromptTemplate
from replug.train.labels.candidates import Candidates
from replug.train.pipeline import ScoreError

TEXTS_PER_CALL = 16
CALLS_IN_FLIGHT = 8

Score = ScoreSum | ContinuationScore


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """How a document and a text are put to the LM; `check` is called while waiting, to raise what ends it."""

    lm: CachingLM
    template: PromptTemplate
    corpus: CorpusStore
    check: Callable[[], None]

    def rows(
        self, split: str, store: WindowStore, candidates: Candidates, similarities: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """A row of the labels for each text, in order. Development texts have the log-probs of their tokens too."""
        progress = Progress(f"scoring candidates ({split})", len(store))
        for texts, scores in self._scored(store, candidates, with_tokens=split == "dev"):
            yield from self._rows_of(store, texts, scores, candidates, similarities)
            progress.advance(len(texts), f"{len(texts) * (candidates.doc_rows.shape[1] + 1):,} pairs a call")

    def _scored(
        self, store: WindowStore, candidates: Candidates, with_tokens: bool
    ) -> Iterator[tuple[range, list[Score]]]:
        """Some texts and the scores of their pairs, each text's own without a document first."""
        waiting: deque[tuple[range, Future[list[Score]]]] = deque()
        for start in range(0, len(store), TEXTS_PER_CALL):
            texts = range(start, min(start + TEXTS_PER_CALL, len(store)))
            waiting.append((texts, self._submit(store.windows(texts), candidates.doc_rows[texts], with_tokens)))
            if len(waiting) == CALLS_IN_FLIGHT:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: "deque[tuple[range, Future[list[Score]]]]") -> tuple[range, list[Score]]:
        texts, scores = waiting.popleft()
        return texts, wait_for(scores, self.check)

    def _submit(self, windows: Sequence[Window], doc_rows: np.ndarray, with_tokens: bool) -> Future:
        prefixes, continuations = [], []
        for window, rows in zip(windows, doc_rows, strict=True):
            for text in (None, *self.corpus.texts(rows)):
                prefixes.append(self.template.prefix(text, window.context, window.continuation))
                continuations.append(window.continuation)
        submit: Callable[..., Future] = self.lm.submit if with_tokens else self.lm.submit_sums
        return submit(prefixes, continuations)

    def _rows_of(
        self,
        store: WindowStore,
        texts: range,
        scores: list[Score],
        candidates: Candidates,
        similarities: np.ndarray,
    ) -> Iterator[dict[str, Any]]:
        per_text = candidates.doc_rows.shape[1] + 1
        for place, (row, text) in enumerate(zip(texts, text_columns(store, texts), strict=True)):
            own = scores[place * per_text : (place + 1) * per_text]
            documents = candidates.doc_rows[row]
            ids = [document.id for document in self.corpus.documents(documents)]
            _require_comparable(text["id"], ids, own)
            yield {
                **text,
                "num_tokens": own[0].num_tokens,
                "sum_logprob_alone": own[0].sum_logprob,
                "doc_ids": ids,
                "doc_rows": documents,
                "given_by": [GIVERS[giver] for giver in candidates.given_by[row]],
                "ranks": candidates.ranks[row],
                "similarities": similarities[row],
                "sum_logprobs": [score.sum_logprob for score in own[1:]],
                **_tokens(own),
            }


def _tokens(scores: Sequence[Score]) -> dict[str, Any]:
    found = [score.token_logprobs for score in scores if isinstance(score, ContinuationScore)]
    return {"token_logprobs": found[1:], "token_logprobs_alone": found[0]} if found else {}


def _require_comparable(text: str, documents: Sequence[str], scores: Sequence[Score]) -> None:
    """Raise ScoreError for a score that is no number, or is of other tokens than the text's other scores."""
    places = ("without a document", *(f"after document {document}" for document in documents))
    for place, score in zip(places, scores, strict=True):
        if not np.isfinite(score.sum_logprob):
            raise ScoreError(f"the LM's score of text {text} {place} is {score.sum_logprob}; expected a finite number")
        if score.num_tokens != scores[0].num_tokens:
            raise ScoreError(
                f"the LM counts {score.num_tokens} tokens of text {text} {place}, and {scores[0].num_tokens} without "
                "one; expected the same tokens, whose scores can be compared"
            )
