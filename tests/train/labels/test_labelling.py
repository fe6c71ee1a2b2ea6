"""Labels: their candidates, each document once and as many for every text; scored once; and `train.labels=auto`."""

import contextlib
import json
import re
import shlex
import shutil
import signal
import sqlite3
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.errors import RunError, UserError
from replug.config.load import load_config
from replug.config.schema import Config, LabelConfig
from replug.data.labels import Labels, schema_of, write_labels
from replug.data.records import Example
from replug.data.store import PreparedSet
from replug.models.black_box_lm import ContinuationScore
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.train.labels import SMALL, hits_of, label_rows, mix_candidates
from replug.train.pipeline import EXAMPLES_PER_CALL
from tests.support.command_line import ROOT, CommandLine, start, wait_for
from tests.support.evaluating import kill_at
from tests.support.labels import LabellingLM
from tests.support.runs import metrics, wait_for_step, what_must_be_equal

DENSE_ROWS = np.array([[3, 1], [0, 4]])
BM25_ROWS = np.array([[1, 5, 3, 6], [4, 0, 7, 1]])


def any_document(row, doc_rows):
    return np.ones(len(doc_rows), bool)


def mixed_of(dense, bm25, random=0, bm25_rows=BM25_ROWS, num_documents=10, seed=0, allowed=any_document, **given):
    wanted = LabelConfig(dense=dense, bm25=bm25, random=random)
    rows = {"dense": DENSE_ROWS, "bm25": bm25_rows, "num_documents": num_documents}
    return mix_candidates(wanted, **rows, seed=seed, allowed=allowed, **given)


def test_bm25_gives_its_best_documents_that_are_not_there_yet_and_the_next_nearest_stand_in_where_it_has_no_more():
    assert mixed_of(2, 2).tolist() == [[3, 1, 5, 6], [0, 4, 7, 1]]
    spare, bm25 = np.array([[3, 1, 8, 9], [0, 4, 5, 6]]), np.array([[1, 5, -1, -1], [-1, -1, -1, -1]])
    assert mixed_of(2, 2, bm25_rows=bm25, spare=spare).tolist() == [[3, 1, 5, 8], [0, 4, 5, 6]]


@pytest.mark.parametrize("num_documents", [8, SMALL + 100])
def test_random_documents_are_others_and_the_same_for_the_same_seed(num_documents):
    first, again = (mixed_of(2, 1, 3, num_documents=num_documents, seed=7) for _ in range(2))
    assert (first == again).all()
    assert all(len(set(row)) == 6 for row in first.tolist())
    other = mixed_of(2, 1, 3, num_documents=num_documents, seed=8)
    assert (first != other).any()


def test_a_texts_own_source_gives_no_candidate_by_bm25_or_chance():
    sources = {row: f"s{row % 4}" for row in range(12)}

    def allowed(row, doc_rows):
        return np.array([row == 1 or sources[doc] != "s1" for doc in doc_rows.tolist()])

    mixed = mixed_of(1, 1, 4, num_documents=12, allowed=allowed)
    assert not any(sources[row] == "s1" for row in mixed[0, 1:].tolist())


def test_too_few_of_bm25_ask_for_a_deeper_search_and_too_small_a_corpus_is_refused():
    assert mixed_of(2, 3) is None
    with pytest.raises(UserError, match="too few for 10 candidates"):
        mixed_of(2, 2, 6, num_documents=9)


class StoredIds:
    """A corpus of the documents d0 to d9."""

    def rows_of(self, ids):
        return {name: int(name[1:]) for name in ids if name[0] == "d"}


def test_given_candidates_are_those_of_the_rows_or_of_a_run_and_too_few_or_unknown_ones_are_refused(tmp_path):
    examples = [Example("a", "x", " y", "all", candidates=("d3", "d1", "d7")), Example("b", "x", " z", "all")]
    hits = ("b Q0 d5 1 9 t", "a Q0 d4 2 1.5 t", "a Q0 d2 1 2.5 t", "b Q0 d6 2 8 t", "b Q0 gone 3 7 t")
    (tmp_path / "run.trec").write_text("\n".join(hits))

    def rows_of(hits: str, dense: int, texts: list[Example] = examples) -> list[list[int]]:
        return hits_of(LabelConfig(hits=hits, dense=dense), StoredIds(), texts).tolist()  # type: ignore[arg-type]

    assert rows_of("rows", 2, examples[:1]) == [[3, 1]]
    assert rows_of(str(tmp_path / "run.trec"), 2) == [[2, 4], [5, 6]]
    with pytest.raises(UserError, match=r"rows has 0 candidates of text b; expected label\.dense=2 or more"):
        rows_of("rows", 2)
    with pytest.raises(UserError, match="document gone of text b is not in the corpus"):
        rows_of(str(tmp_path / "run.trec"), 3, examples[1:])


# Scores -----------------------------------------------------------------------------------------------------------

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
        def score(self, prefixes, continuations, **more):
            return [ContinuationScore(np.array([np.nan], np.float32)) for _ in prefixes]

    class OtherTokensLM(LabellingLM):
        def score(self, prefixes, continuations, **more):
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


def num_scored(cache: Path) -> int:
    """Pairs in the cache of scores; 0 where there is none yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{cache}?mode=ro", uri=True)) as file:
            return int(file.execute("SELECT COUNT(*) FROM cached").fetchone()[0])
    except sqlite3.OperationalError:  # the file, or its tables, are not there yet
        return 0


@pytest.mark.nightly
def test_killed_and_run_again_no_pair_is_scored_twice(replug, tmp_path):
    config, out = ROOT / "configs/debug.yaml", tmp_path / "labels"
    keys = ("data.num_queries=60", "data.num_dev=12", "label.dense=4", "label.bm25=2", "label.random=1")
    label = ("prepare", config, "--labels", out, f"run_dir={tmp_path}/run", f"data.out={tmp_path}/set", *keys)
    before = kill_at(1, lambda: num_scored(out / "scores.sqlite"), *label, "lm.path=stand_in:0.3")
    ended = replug(*label, "lm.path=stand_in:0.3")
    assert ended.status == 0, ended.printed
    counts = re.search(r"(\d+) pairs were scored (\d+) were found", " ".join(ended.printed.replace(",", "").split()))
    scored, hits = map(int, counts.groups())
    assert 0 < before == hits and scored == num_scored(out / "scores.sqlite") - before
    labels = Labels(out)
    assert labels.counts == {"queries": 60, "dev": 12} and scored + hits == 72 * 7


# One command that labels and trains ---------------------------------------------------------------------------------

STAND_INS = ("retriever.path=stand_in", "lm.path=stand_in")
CONFIG = ROOT / "configs/own_data.yaml"
OWN = ("data.questions=null", "train.epochs=2", "train.batch_size=4", "label.dense=3", "label.bm25=1")


def typed(folder: Path, replug: CommandLine, *others: str) -> list[str]:
    """The command that `replug prepare --example` prints, with stand-ins for its models."""
    words = shlex.split(replug("prepare", "--example", folder / "mine").output.splitlines()[-1])[2:]
    given = ("retriever.path", "lm.path")
    kept = [word for word in words[2:] if not word.startswith(given)]
    return [words[0], str(CONFIG), *kept, *STAND_INS, *OWN, *others]


def test_a_set_without_development_texts_is_refused(tmp_path: Path, replug: CommandLine) -> None:
    keys = [word for word in typed(tmp_path, replug)[2:] if not word.startswith("data.dev")]
    with pytest.raises(UserError, match=r"data\.dev is missing; expected a file, since train\.patience chooses"):
        load_config(CONFIG, keys)


def test_the_examples_command_labels_trains_and_measures(tmp_path: Path, here: CommandLine) -> None:
    command, run = typed(tmp_path, here), tmp_path / "mine/run"
    ended = here(*command)
    assert ended.status == 0, ended.printed
    printed = ended.printed
    scored = [int(count) for count in re.findall(r"(\d+) pairs were scored", printed)]
    assert scored[0] == 80  # 4 candidates of 20 texts
    assert Labels(run / "labels").origin.num_candidates == 4
    stages = re.findall(r"^stage \d of 5, .*?(?=, about|$)", printed, re.MULTILINE)
    names = ["index", "labels", "training", "tuned retriever's search", "held-out texts"]
    assert stages == [f"stage {number} of 5, {name}" for number, name in enumerate(names, 1)]
    assert printed.count("report: ") == 1 and not list(run.glob("**/labels/index"))
    assert json.loads((run / "labels/manifest.json").read_text())["counts"] == {"queries": 16, "dev": 4}
    results = json.loads((run / "results.json").read_text())
    assert results["weights"]["best"]["bpb"] > 0
    again = here(*command)  # shows it
    assert again.status == 0 and "pairs were scored" not in again.printed, again.printed
    shutil.rmtree(run / "labels")
    assert "holds no finished set of labels" in here(*command).errors


# Labels, then live ---------------------------------------------------------------------------------------------


TO_LIVE = (
    *("train.labels=auto", "label.dense=8", "label.random=2", "train.label_steps=8", "train.max_steps=16"),
    *("data.num_queries=60", "data.num_dev=12", "data.num_heldout=10"),
)


@pytest.mark.slow
def test_the_index_is_of_the_weights_at_the_hand_over_and_a_killed_run_has_the_same_losses(
    tmp_path: Path, here: CommandLine
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    here.finish(whole, *TO_LIVE)
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(16))
    assert not any("index/version" in row for row in rows[:8])
    # Adopted: the hand-over's index at step 8, and a refresh of step 12, three steps later.
    assert [row["index/live_version"] for row in rows] == [0] * 8 + [1] * 7 + [2]
    assert [row["index/live_step"] for row in rows[7:9]] == [0, 8]
    assert [row["pipeline/query_age_steps"] for row in rows[8:12]] == [0, 1, 2, 2]
    measured = {row["dev/step"]: row["dev/bpb"] for row in rows}
    assert set(measured) == {0, 8, 12}
    weights = json.loads((whole / "results.json").read_text())["weights"]
    assert weights["steps"] == 16 and weights["best"]["bpb"] <= min(measured.values()) + 1e-6
    assert Labels(whole / "labels").origin.num_candidates == 10

    killed = start(run, *TO_LIVE, "lm.path=stand_in:0.01")
    wait_for_step(run, 10, killed)  # live, from the checkpoint at the hand-over
    killed.kill()
    wait_for(killed, status=-signal.SIGKILL)
    assert "resuming at step" in here.finish(run, *TO_LIVE, "lm.path=stand_in:0.01")
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert json.loads((run / "results.json").read_text())["weights"] == weights
