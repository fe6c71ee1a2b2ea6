"""`replug evaluate` as a user types it, on stand-ins and on a run that nothing disturbed."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replug.models.score_cache import ScoreCache
from tests.support.command_line import CommandLine, start_process
from tests.support.evaluating import on_run, typed, wait_for_lines
from tests.support.preparing import write_jsonl
from tests.support.runs import heldout_bits

Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture(scope="module")
def evaluate(replug: CommandLine) -> Evaluate:
    """Runs an evaluation to a good end; gives its results and what was printed."""

    def evaluate(name: str, out: Path, *overrides: str) -> tuple[dict, str]:
        ended = replug(*typed(name, f"out={out}", *overrides))
        assert ended.status == 0, ended.printed
        return next(iter(json.loads((out / "results.json").read_text()).values())), ended.printed

    return evaluate


@pytest.fixture(scope="module")
def measured(quiet_run, evaluate, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "lm"
    evaluate("lm", out, *on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5")
    return out


@pytest.mark.slow
def test_bits_per_byte_are_those_that_training_ended_with(quiet_run, measured):
    results = json.loads((measured / "results.json").read_text())["language_modelling"]
    of_run = heldout_bits(quiet_run)
    for method in ("none", "replug", "lsr"):
        assert results[method]["bpb"]["value"] == pytest.approx(of_run[method], abs=1e-6)
        assert results[method]["bpb"]["n"] == 40


def test_every_example_is_in_the_parquet_file_with_its_documents_and_weights(measured):
    rows = pq.read_table(measured / "examples.parquet").to_pylist()
    assert len(rows) == 40 * 6
    for row in rows:
        wanted = {"none": 0, "lsr@1": 1}.get(row["method"], 5)
        assert len(row["documents"]) == wanted
        assert sum(row["weights"]) == pytest.approx(1)
        assert len(row["token_logprobs"]) == row["tokens"]
    assert {len(row["weights"]) for row in rows if row["method"] == "lsr/concat"} == {1}
    assert (measured / "figure.svg").read_text().startswith("<svg")
    assert "bpb of lsr − none" in (measured / "table.md").read_text()


def test_a_run_directory_as_a_retriever_brings_its_index(evaluate, quiet_run, measured, tmp_path):
    results, output = evaluate(
        "lm", tmp_path / "out", *on_run(quiet_run), f"retrievers.lsr={quiet_run}", "methods=[lsr]", "k=5"
    )
    assert f"{quiet_run}: index version" in output and "embedding" not in output
    built = json.loads((measured / "results.json").read_text())["language_modelling"]["lsr"]["bpb"]["value"]
    assert results["lsr"]["bpb"]["value"] == pytest.approx(built, abs=1e-3)  # the run's vectors may be in bfloat16


def test_a_finished_evaluation_is_shown_again_and_another_is_refused(evaluate, quiet_run, measured):
    before = (measured / "results.json").stat().st_mtime_ns
    same = [*on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5"]
    _, output = evaluate("lm", measured, *same)
    assert "holds a finished evaluation" in output
    assert (measured / "results.json").stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match=r"k is 4, but the evaluation in .* was made with 5"):
        evaluate("lm", measured, *same, "k=4")


@pytest.mark.nightly
def test_a_killed_evaluation_gives_the_same_results_and_scores_nothing_twice(evaluate, quiet_run, tmp_path):
    settings = [*on_run(quiet_run), "methods=[none,replug,lsr]", "k=5", "lm.tokens_per_batch=16"]
    whole, _ = evaluate("lm", tmp_path / "whole", *settings)
    out = tmp_path / "killed"
    slow = [*settings, "lm.path=stand_in:0.02"]
    process = start_process(*typed("lm", f"out={out}", *slow))
    wait_for_lines(process, out / "outcomes.jsonl", 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = len((out / "outcomes.jsonl").read_bytes().splitlines())
    assert 10 <= done < 40, "it was not killed in the middle"
    again, _ = evaluate("lm", out, *slow)
    assert again == whole
    assert num_scores(out) == num_scores(tmp_path / "whole")


def num_scores(out: Path) -> int:
    """Count the pairs that the cache holds."""
    with closing(ScoreCache(out / "scores.sqlite")) as cache:
        return cache.num_rows()


COLOURS = ["red", "green", "blue", "grey", "white", "black", "brown", "pink"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """One document for each of thirty things, which says its colour three times."""
    rows = [
        {"id": f"d{i}", "text": f"thing{i} is {COLOURS[i % 8]} {COLOURS[i % 8]} {COLOURS[i % 8]}"} for i in range(30)
    ]
    return write_jsonl(tmp_path / "corpus.jsonl", rows)


@pytest.fixture
def questions(tmp_path) -> Path:
    rows = [{"id": f"q{i}", "question": f"thing{i}", "answers": [COLOURS[i % 8]], "gold": [f"d{i}"]} for i in range(30)]
    return write_jsonl(tmp_path / "questions.jsonl", rows)


def common(corpus: Path) -> list[str]:
    return [f"data.corpus={corpus}", "retriever.path=stand_in", "index.dtype=float32"]


def test_retrieval_needs_no_lm(evaluate, tmp_path, corpus, questions):
    results, _ = evaluate("retrieval", tmp_path / "out", *common(corpus), f"questions.path={questions}")
    assert list(results) == ["random", "bm25", "replug"]
    assert results["bm25"]["Success@1"]["value"] == 1.0, "a question's own word is in one document only"
    assert results["random"]["Success@1"]["value"] < 0.5
    assert {"Success@20", "R@5", "MRR@10", "nDCG@10"} <= results["replug"].keys()
    assert results["replug"]["Success@1"]["n"] == 30
