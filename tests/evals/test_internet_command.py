"""`replug evaluate` from searched passages on stand-ins: the grid, a reranking LM, labels, and killed in the middle."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replug.config.load import load_evaluation_config
from replug.evals.internet_sets import is_validation, read_set
from replug.evals.run import evaluate
from tests.support.cached_scores import num_cached
from tests.support.command_line import ROOT, CommandLine
from tests.support.evaluating import evaluated, kill_at, num_lines, open_lms_here
from tests.support.preparing import write_jsonl

GRID = ["none", "gold", "direct@1", "rag@1", "direct@3", "rag@3", "noisy_channel@3", "poe@2", "poe@3"]
SHOTS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Towns whose rivers are named in a document of each, which repeats the river, and in questions of two sets."""
    folder = tmp_path_factory.mktemp("internet")
    towns = [f"town{number}" for number in range(24)]
    texts = [f"{town} lies on the river{n % 5} river{n % 5}. The river{n % 5} is long." for n, town in enumerate(towns)]
    write_jsonl(folder / "corpus.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)])
    nq = [
        {"id": f"q{n}", "question": f"on which river lies {town}", "answer": [f"river{n % 5}"], "gold": [f"d{n}"]}
        for n, town in enumerate(towns)
    ]
    write_jsonl(folder / "nq.jsonl", nq)
    strategy = [
        {"qid": f"q{n}", "question": f"Is {town} on river1?", "answer": n % 5 == 1, "facts": [texts[n]]}
        for n, town in enumerate(towns[:8])
    ]
    (folder / "strategyqa.json").write_text(json.dumps(strategy))
    return folder


def typed(data: Path, out: Path, *overrides: str, dataset: str = "nq", file: str = "nq.jsonl") -> list[str]:
    return [
        "evaluate",
        str(ROOT / "configs/eval_internet.yaml"),
        f"questions.dataset={dataset}",
        f"out={out}",
        f"questions.path={data / file}",
        f"questions.shots={SHOTS}",
        "questions.max_new_tokens=2",
        f"data.corpus={data / 'corpus.jsonl'}",
        f"methods=[{','.join(GRID)}]",
        "web.num_results=4",
        "lm.path=stand_in",
        *overrides,
    ]


Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture
def evaluate_here(data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Evaluate:
    """The whole evaluation with its LMs in this process, so that nothing waits for Ray; and what was logged."""
    open_lms_here(monkeypatch)

    def evaluate_here(out: Path, *overrides: str, **of: str) -> tuple[dict, str]:
        _, config, *given = typed(data, out, *overrides, **of)
        with caplog.at_level("INFO"):
            results = evaluate(load_evaluation_config(config, given))["internet_qa"]
        return results, caplog.text

    return evaluate_here


def test_the_whole_grid_is_measured_in_one_pass(evaluate_here, data, tmp_path):
    out = tmp_path / "out"
    results, _ = evaluate_here(out)
    assert list(results) == GRID
    value = {name: {metric: entry["value"] for metric, entry in of.items()} for name, of in results.items()}
    rows = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert len(rows) == 24 - SHOTS
    questions = {one.example.id: one for one in read_set("nq", data / "nq.jsonl")}
    validation = [row["id"] for row in rows if is_validation(questions[row["id"]])]
    assert results["poe@3"]["exact_match"]["n"] == len(rows) - len(validation)
    assert results["poe@3"]["validation"]["n"] == len(validation)
    assert set(results["poe@3"]["validation"]["weights"]) > {"passage", "answer_given_question"}
    assert value["direct@1"]["retrieval_recall"] == 1.0 and value["direct@1"]["answer_in_evidence"] == 1.0
    assert value["direct@3"]["best_candidate"] >= value["direct@1"]["best_candidate"]
    assert "poe@3 - none" not in value["none"]
    assert "exact_match - direct@3" in results["poe@3"]
    examples = pq.read_table(out / "examples.parquet").to_pylist()
    assert len(examples) == (len(rows) - len(validation)) * len(GRID)
    assert {len(row["documents"]) for row in examples if row["method"] == "poe@2"} == {2}
    for row in examples:  # what was asked, what is right, and what could have been answered, best first
        assert row["prompt"].endswith(f"Question: {row['question']}\nAnswer:") and row["prompt"].count("Question") == 4
        assert row["references"] == list(questions[row["id"]].answers)
        assert row["answer"] == (row["candidates"] or [""])[0]
    assert "The validation part has" in (out / "table.md").read_text()
    again, printed = evaluate_here(out)
    assert again == results and "holds a finished evaluation" in printed


def test_another_lm_reranks_the_labels_that_the_first_one_scores(evaluate_here, tmp_path):
    out = tmp_path / "out"
    settings = ["rerank_lm.path=stand_in", "methods=[none,gold,direct@2,poe@2]"]
    results, _ = evaluate_here(out, *settings, dataset="strategyqa", file="strategyqa.json")
    assert results["poe@2"]["accuracy"]["n"] <= 8 - SHOTS and "copied" not in results["poe@2"]
    assert 0.5 <= results["poe@2"]["gold_overlap"]["value"] <= 1.0, "documents of other towns have half of the words"
    assert num_cached(out / "rerank_scores.sqlite").total() > 0 < num_cached(out / "scores.sqlite").total()
    assert "reranked by" in (out / "inputs.json").read_text()


@pytest.fixture(scope="module")
def evaluate_typed(replug: CommandLine, data: Path) -> Evaluate:
    return lambda out, *overrides: evaluated(replug, out, *typed(data, out, *overrides))


@pytest.mark.slow
def test_killed_among_questions_it_goes_on_to_the_same_results(evaluate_typed, evaluate_here, data, tmp_path):
    settings = ["methods=[none,gold,direct@1,poe@3]", "rerank_lm.path=stand_in"]
    whole, _ = evaluate_typed(tmp_path / "whole", *settings)
    assert evaluate_here(tmp_path / "here", *settings)[0] == whole, "replicas that hold both LMs say what each says"
    out = tmp_path / "killed"
    slow = [*settings, "lm.path=stand_in:0.05"]
    done = kill_at(3, lambda: num_lines(out / "outcomes.jsonl"), *typed(data, out, *slow))
    assert done < 24 - SHOTS, "it was not killed in the middle"
    killed_at = num_cached(out / "scores.sqlite")
    again, _ = evaluate_typed(out, *slow)
    assert again == whole
    assert num_cached(out / "scores.sqlite") == num_cached(tmp_path / "whole/scores.sqlite") > killed_at
    assert killed_at.total() > 0
