"""Labels: scored once, and killed and run again as real processes."""

import contextlib
import re
import sqlite3
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.errors import RunError
from replug.config.schema import Config
from replug.data.labels import Labels, schema_of, write_labels
from replug.data.store import PreparedSet
from replug.models.black_box_lm import ContinuationScore
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.train.labels import label_rows
from replug.train.pipeline import EXAMPLES_PER_CALL
from tests.support.command_line import ROOT, start_process
from tests.support.labels import LabellingLM
from tests.support.runs import wait_for_step, what_must_be_equal

K = 3


@pytest.fixture
def data(debug_config: Config, tmp_path: Path) -> PreparedSet:
    debug_config.data.num_queries = 3 * EXAMPLES_PER_CALL
    return prepared_set(debug_config, tmp_path / "data")


def rows_of(lm: object, data: PreparedSet):
    rows = np.arange(K * len(data.queries)).reshape(-1, K) % len(data.corpus)
    given = (data.queries, rows, np.zeros(rows.shape, np.float32), False)
    return label_rows(lm, PromptTemplate(), data.corpus, lambda: None, *given)  # type: ignore[arg-type]


def test_pairs_that_were_scored_before_an_interruption_are_not_scored_again(data, tmp_path):
    num_pairs = len(data.queries) * K
    first = CachingLM(InProcessLM(StandInLM()), tmp_path / "scores.sqlite")
    begun = list(islice(rows_of(first, data), 5))
    first.close()
    second = CachingLM(InProcessLM(StandInLM()), tmp_path / "scores.sqlite")
    whole = list(rows_of(second, data))
    assert second.num_hits >= EXAMPLES_PER_CALL * K and second.num_hits + second.num_misses == num_pairs
    assert second.num_misses == num_pairs - first.num_misses
    second.close()
    for before, after in zip(begun, whole, strict=False):
        assert before["sum_logprobs"] == after["sum_logprobs"] and before["id"] == after["id"]


def test_a_score_that_is_not_finite_or_of_other_tokens_is_refused_with_the_text_and_the_document(data):
    class NanLM(LabellingLM):
        def score(self, prefixes, continuations):
            return [ContinuationScore(np.array([np.nan], np.float32)) for _ in prefixes]

    class OtherTokensLM(LabellingLM):
        def score(self, prefixes, continuations):
            return [ContinuationScore(np.full(1 + row % 2, -1, np.float32)) for row in range(len(prefixes))]

    text, document = data.queries.examples([0])[0].id, data.corpus.documents([0])[0].id
    with pytest.raises(RunError, match=f"text {text} after document {document} is nan"):
        next(rows_of(NanLM(), data))
    with pytest.raises(RunError, match=rf"2 tokens of text {text} after document \S+, and 1 after document {document}"):
        next(rows_of(OtherTokensLM(), data))


def test_labels_have_the_queries_of_texts_that_have_their_own(data, tmp_path):
    rows = list(islice(rows_of(LabellingLM(), data), 2))
    rows[0]["query"] = "which river?"
    for has_queries, queries in ((True, ["which river?", rows[1]["context"]]), (False, [r["context"] for r in rows])):
        write_labels(tmp_path / "queries.parquet", rows, schema_of(False, has_queries))
        written = pq.read_table(tmp_path / "queries.parquet")
        assert [row.get("query", row["context"]) for row in written.to_pylist()] == queries


SET = ("data.num_queries=60", "data.num_dev=12", "data.num_heldout=10")
LABEL = (*SET, "label.dense=4", "label.bm25=2", "label.random=1")
TRAIN = (*SET, "train.epochs=2", "train.batch_size=8", "evaluate.heldout=false")


def num_scored(cache: Path) -> int:
    """Pairs in the cache of scores; 0 where there is none yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{cache}?mode=ro", uri=True)) as file:
            return int(file.execute("SELECT COUNT(*) FROM cached").fetchone()[0])
    except sqlite3.OperationalError:  # the file, or its tables, are not there yet
        return 0


@pytest.mark.slow
def test_killed_and_run_again_no_pair_is_scored_twice_and_a_training_on_the_labels_resumes_exactly(replug, tmp_path):
    config, out = ROOT / "configs/debug.yaml", tmp_path / "labels"
    run, twin = tmp_path / "run", tmp_path / "twin"
    label = ("prepare", config, "--labels", out, f"run_dir={run}", f"data.out={tmp_path}/set", *LABEL)
    slow = start_process(*label, "lm.path=stand_in:0.3")
    deadline = time.monotonic() + 300
    while not num_scored(out / "scores.sqlite"):
        assert slow.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    slow.kill()
    slow.communicate()
    before = num_scored(out / "scores.sqlite")
    ended = replug(*label, "lm.path=stand_in:0.3")
    assert ended.status == 0, ended.printed
    counts = re.search(r"(\d+) pairs were scored (\d+) were found", " ".join(ended.printed.replace(",", "").split()))
    scored, hits = map(int, counts.groups())
    assert 0 < before == hits and scored == num_scored(out / "scores.sqlite") - before
    labels = Labels(out)
    assert labels.counts == {"queries": 60, "dev": 12} and scored + hits == 72 * 7

    train = ("train", config, f"data.prepared={tmp_path}/set", "data.source=null", f"train.labels={out}", *TRAIN)
    lasting = ("lm.path=stand_in:0.3", "checkpoint.every_steps=3")
    killed = start_process(*train, *lasting, f"run_dir={run}")
    wait_for_step(run, 6, killed)
    killed.kill()
    killed.communicate()
    for folder in (run, twin):
        assert replug(*train, *lasting, f"run_dir={folder}").status == 0
    assert len(what_must_be_equal(run)) == 15
    assert what_must_be_equal(run) == what_must_be_equal(twin)
