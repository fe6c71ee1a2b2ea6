"""`replug evaluate` as a user types it, on stand-ins and on a run that nothing disturbed."""

import csv
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, DPRContextEncoder, DPRQuestionEncoder

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.evals.evidence import RetrievedDocuments
from replug.evals.folder import EvaluationFolder
from replug.models.score_cache import ScoreCache
from replug.models.stand_in_encoder import write_stand_in_encoder
from tests.support.command_line import ROOT, CommandLine, start_process
from tests.support.dpr_folders import write_dpr_pair
from tests.support.evaluating import on_run, typed, wait_for_lines
from tests.support.fault_server import FaultServer
from tests.support.preparing import write_jsonl

Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture(scope="module")
def evaluate(replug: CommandLine) -> Evaluate:
    """Runs an evaluation to a good end; gives its results and what was printed."""

    def evaluate(name: str, out: Path, *overrides: str) -> tuple[dict, str]:
        ended = replug(*typed(name, f"out={out}", *overrides))
        assert ended.status == 0, ended.printed
        return json.loads((out / "results.json").read_text()), ended.printed

    return evaluate


@pytest.fixture(scope="module")
def measured(quiet_run, evaluate, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "lm"
    evaluate("lm", out, *on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5")
    return out


@pytest.mark.slow
def test_bits_per_byte_are_those_that_training_ended_with(quiet_run, measured):
    results = json.loads((measured / "results.json").read_text())
    of_run = json.loads((quiet_run / "results.json").read_text())["bpb"]["all"]
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
    built = json.loads((measured / "results.json").read_text())["lsr"]["bpb"]["value"]
    assert results["lsr"]["bpb"]["value"] == pytest.approx(built, abs=1e-3)  # the run's vectors may be in bfloat16


def test_an_index_of_other_documents_is_refused(evaluate, quiet_run, tmp_path, corpus, questions):
    with pytest.raises(AssertionError, match=r"documents that are not the evaluation's 30; name the retriever's own"):
        evaluate(
            "retrieval",
            tmp_path / "out",
            *common(corpus),
            f"retrievers.lsr={quiet_run}",
            "methods=[lsr]",
            f"questions.path={questions}",
        )


@pytest.mark.nightly
def test_a_server_that_fails_now_and_then_gives_the_same_bits_and_answers_from_whole_answers(
    evaluate, quiet_run, measured, tmp_path, corpus, questions
):
    alone = json.loads((measured / "results.json").read_text())
    with FaultServer(fault_share=0.2) as server:
        served = [
            "lm.path=null",
            "lm.model=words",
            f"lm.url={server.url}",
            "lm.timeout_seconds=2",
            "lm.max_attempts=10",
        ]
        settings = [*on_run(quiet_run), *served, "methods=[none,bm25]", "k=5"]
        results, _ = evaluate("lm", tmp_path / "lm", *settings)
        asked = ["questions.shots=2", "questions.max_questions=4", "questions.max_new_tokens=1", "k=2"]
        settings = [*common(corpus), *served, f"questions.path={questions}", *asked, "methods=[none,bm25]"]
        answers, _ = evaluate("open_qa", tmp_path / "open_qa", *settings)
        assert sum(server.faults.values()) > 5
    for method in ("none", "bm25"):
        assert results[method]["bpb"]["value"] == pytest.approx(alone[method]["bpb"]["value"], abs=1e-6)
    assert answers["bm25"]["exact_match"]["n"] == 4


def test_a_finished_evaluation_is_shown_again_and_another_is_refused(evaluate, quiet_run, measured):
    before = (measured / "results.json").stat().st_mtime_ns
    same = [*on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5"]
    _, output = evaluate("lm", measured, *same)
    assert "holds a finished evaluation" in output
    assert (measured / "results.json").stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match=r"k is 4, but the evaluation in .* was begun with 5"):
        evaluate("lm", measured, *same, "k=4")


def test_a_key_that_was_not_there_before_is_refused(tmp_path, corpus, questions):
    keys = [f"out={tmp_path / 'out'}", f"questions.path={questions}", f"data.corpus={corpus}", "retriever.path=x"]
    load = partial(load_evaluation_config, ROOT / "configs/eval_retrieval.yaml")
    folder = EvaluationFolder(tmp_path / "out")
    folder.claim(load(keys), None)
    folder.claim(load(keys), None)
    with pytest.raises(UserError, match=r"query_encoders\.replug is y, but the evaluation in .* begun with None"):
        folder.claim(load([*keys, "query_encoders.replug=y"]), None)


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
    rows, computed = cache_counts(out)
    again, _ = evaluate("lm", out, *slow)
    assert again == whole
    rows_after, computed_after = cache_counts(out)
    assert rows_after == cache_counts(tmp_path / "whole")[0]
    assert computed_after - computed == rows_after - rows, "what was scored before was scored again"


def cache_counts(out: Path) -> tuple[int, int]:
    """Pairs that the file holds, and pairs that an LM was asked for."""
    with closing(ScoreCache(out / "scores.sqlite")) as cache:
        return cache.num_rows(), sum(use.misses for use in cache.models())


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


@pytest.mark.slow
def test_queries_of_dpr_have_their_own_encoder(evaluate, tmp_path, corpus, questions):
    documents, queries = write_dpr_pair(tmp_path / "dpr")
    settings = [f"retrievers.dpr={documents}", f"query_encoders.dpr={queries}", "similarities.dpr=dot"]
    methods = "methods=[dpr,replug]"  # which is cosine
    evaluate("retrieval", tmp_path / "out", *common(corpus), f"questions.path={questions}", *settings, methods)
    assert RetrievedDocuments.load(tmp_path / "out/found/replug.npz").similarities.max() <= 1.0001
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    ids, tokenizer = [f"d{i}" for i in range(len(texts))], AutoTokenizer.from_pretrained(queries)
    of_queries, of_documents = DPRQuestionEncoder.from_pretrained(queries), DPRContextEncoder.from_pretrained(documents)
    with torch.no_grad():
        keys = torch.cat([of_documents(**tokenizer(text, return_tensors="pt")).pooler_output for text in texts])
        rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
        for row in (row for row in rows if row["method"] == "dpr"):
            query = of_queries(**tokenizer(f"thing{row['id'][1:]}", return_tensors="pt")).pooler_output[0]
            similarities = dict(zip(ids, (keys @ query).tolist(), strict=True))
            found = [similarities[document] for document in row["documents"]]
            assert found == pytest.approx(sorted(similarities.values(), reverse=True)[: len(found)], abs=1e-4)


@pytest.mark.slow
def test_two_encoders_of_different_width_are_refused(evaluate, tmp_path, corpus, questions):
    write_stand_in_encoder(tmp_path / "wide", hidden_size=64)
    settings = [f"query_encoders.replug={tmp_path / 'wide'}", "methods=[replug]"]
    with pytest.raises(AssertionError, match=r"wide have 64 numbers, those of the documents 32; expected the two"):
        evaluate("retrieval", tmp_path / "out", *common(corpus), f"questions.path={questions}", *settings)


def test_questions_are_searched_for_in_the_form_that_is_asked_for(evaluate, tmp_path, corpus, questions):
    form = 'questions.query="thing3 thing3 thing3 {question}"'
    evaluate("retrieval", tmp_path / "out", *common(corpus), f"questions.path={questions}", form, "methods=[bm25]")
    rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
    assert all(row["documents"][0] == "d3" for row in rows), "the word that is in every query weighs most"


@pytest.mark.slow
def test_open_questions_are_answered_from_documents(evaluate, tmp_path, corpus, questions):
    settings = [f"questions.path={questions}", "questions.shots=2", "questions.max_questions=8", "k=2"]
    methods = "methods=[none,bm25@1,replug,replug/concat]"
    results, _ = evaluate(
        "open_qa",
        tmp_path / "out",
        *common(corpus),
        *settings,
        methods,
        "lm.path=stand_in",
        "questions.max_new_tokens=1",
    )
    assert results["bm25@1"]["answer_recall"]["value"] == 1.0
    assert results["none"]["answer_recall"]["value"] == 0.0
    rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
    assert len(rows) == 8 * 4 and all("answer" in row for row in rows)


@pytest.mark.slow
def test_mmlu_by_subject_and_category(evaluate, tmp_path, corpus):
    for split, count in (("dev", 2), ("test", 6)):
        folder = tmp_path / "mmlu" / split
        folder.mkdir(parents=True)
        for subject in ("anatomy", "philosophy"):
            with (folder / f"{subject}_{split}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerows(
                    [f"{split} thing{i}", "red", "green", "blue", "grey", "ABCD"[i % 4]] for i in range(count)
                )
    settings = [f"questions.path={tmp_path / 'mmlu'}", "questions.shots=2", "questions.max_questions=5", "k=2"]
    results, _ = evaluate("mmlu", tmp_path / "out", *common(corpus), *settings, "lm.path=stand_in",
                               "methods=[none,replug]")  # fmt: skip
    assert results["none"]["accuracy"]["n"] == 10
    assert {"accuracy/anatomy", "accuracy/philosophy", "accuracy/humanities", "accuracy_macro"} <= results[
        "none"
    ].keys()
    assert results["none"]["accuracy_macro"]["value"] == pytest.approx(results["none"]["accuracy"]["value"])


@pytest.mark.slow
def test_tokens_are_coloured(evaluate, tmp_path, quiet_run):
    results, output = evaluate("tokens", tmp_path / "out", *on_run(quiet_run), "texts.max_examples=5", "k=5")
    gains = {name: entry for name, entry in results["replug"].items() if name.startswith("gain_bits/")}
    by_rarity = {name: entry for name, entry in gains.items() if not name.endswith(" - rest")}
    rows = [row for row in pq.read_table(tmp_path / "out/examples.parquet").to_pylist() if row["method"] == "replug"]
    assert all(len(row["token_texts"]) == row["tokens"] for row in rows)
    assert sum(entry["n"] for entry in by_rarity.values()) == sum(row["tokens"] for row in rows)
    assert "mean gain, bits" in output
    page = (tmp_path / "out/tokens.html").read_text()
    assert "By rarity of the word" in page and "rgba(" in page


@pytest.mark.slow
def test_whole_texts_are_scored_with_every_token_once(evaluate, tmp_path, corpus):
    text = " ".join(f"word{i}" for i in range(50))
    (tmp_path / "text.txt").write_text(text)
    lengths = [f"texts.{name}_tokens=16" for name in ("scored", "context", "query")]
    settings = [f"texts.path={tmp_path / 'text.txt'}", *lengths, "lm.path=stand_in", "k=2"]
    results, output = evaluate("lm", tmp_path / "out", *common(corpus), *settings, "methods=[none,long_context,replug]")
    assert "1 of 4 spans have nothing before them: nothing is retrieved for them" in output
    assert results["long_context"]["bpb"]["clusters"] == 1
    rows = [row for row in pq.read_table(tmp_path / "out/examples.parquet").to_pylist() if row["method"] == "replug"]
    assert sum(row["words"] for row in rows) == 50
    assert sum(row["bytes"] for row in rows) == len(text.encode())
    assert [len(row["documents"]) for row in rows] == [0, 2, 2, 2]
