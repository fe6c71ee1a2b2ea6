"""Candidates put to an LM behind its cache: what an interrupted labelling had scored is never scored again."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.models.black_box_lm import ContinuationScore
from replug.models.caching_lm import CachingLM
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.train.labels.candidates import Candidates
from replug.train.labels.scoring import TEXTS_PER_CALL, LabelScorer
from replug.train.pipeline import ScoreError
from tests.support.labels import LabellingLM

K = 3


@pytest.fixture
def data(debug_config: Config, tmp_path: Path) -> PreparedSet:
    debug_config.data.num_queries = 3 * TEXTS_PER_CALL
    return prepared_set(debug_config, tmp_path / "data")


def candidates_of(data: PreparedSet) -> Candidates:
    rows = np.arange(K * len(data.queries)).reshape(-1, K) % len(data.corpus)
    return Candidates(rows, np.zeros_like(rows), np.ones_like(rows))


def rows_of(lm: object, data: PreparedSet):
    scorer = LabelScorer(lm, PromptTemplate("\n"), data.corpus, lambda: None)  # type: ignore[arg-type]
    candidates = candidates_of(data)
    return scorer.rows("queries", data.queries, candidates, np.zeros(candidates.doc_rows.shape, np.float32))


def test_what_was_scored_before_an_interruption_is_not_scored_again(data, tmp_path):
    num_pairs = len(data.queries) * (K + 1)
    first = CachingLM(InProcessLM(StandInLM()), tmp_path / "scores.sqlite")
    begun = list(islice(rows_of(first, data), 5))
    first.close()
    second = CachingLM(InProcessLM(StandInLM()), tmp_path / "scores.sqlite")
    whole = list(rows_of(second, data))
    assert second.num_hits >= TEXTS_PER_CALL * (K + 1) and second.num_hits + second.num_misses == num_pairs
    assert second.num_misses == num_pairs - first.num_misses
    second.close()
    for before, after in zip(begun, whole, strict=False):
        assert before["sum_logprobs"] == after["sum_logprobs"] and before["id"] == after["id"]


def test_a_score_that_is_no_number_and_one_of_other_tokens_are_refused_with_the_text_and_the_document(data):
    class NanLM(LabellingLM):
        def score(self, prefixes, continuations):
            return [ContinuationScore(np.array([np.nan], np.float32)) for _ in prefixes]

    class OtherTokensLM(LabellingLM):
        def score(self, prefixes, continuations):
            return [ContinuationScore(np.full(1 + row % 2, -1, np.float32)) for row in range(len(prefixes))]

    text, document = data.queries.windows([0])[0].id, data.corpus.documents([0])[0].id
    with pytest.raises(ScoreError, match=f"text {text} without a document is nan"):
        next(rows_of(NanLM(), data))
    with pytest.raises(ScoreError, match=f"2 tokens of text {text} after document {document}, and 1 without one"):
        next(rows_of(OtherTokensLM(), data))
