"""`replug evaluate` from searched passages on stand-ins: the grid, a reranking LM, labels, and killed in the middle."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replug.evals.internet.questions import InternetQuestion
from replug.evals.internet.splits import is_validation
from replug.evals.examples import Example
from replug.models.score_cache import ScoreCache
from tests.support.command_line import ROOT, CommandLine, start_process

GRID = ["none", "gold", "direct@1", "rag@1", "direct@3", "rag_full@3", "noisy_channel@3", "poe@2", "poe@3"]
SHOTS = 3


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
        str(ROOT / f"configs/eval_internet_{dataset}.yaml"),
        f"out={out}",
        f"questions.path={data / file}",
        f"questions.shots={SHOTS}",
        "questions.max_new_tokens=2",
        f"data.corpus={data / 'corpus.jsonl'}",
        f"methods=[{','.join(GRID)}]",
        "web.num_results=4",
        "num_resamples=100",
        "lm.path=stand_in",
        *overrides,
    ]


Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture(scope="module")
def evaluate(replug: CommandLine, data: Path) -> Evaluate:
    def evaluate(out: Path, *overrides: str, **of: str) -> tuple[dict, str]:
        ended = replug(*typed(data, out, *overrides, **of))
        assert ended.status == 0, ended.printed
        return json.loads((out / "results.json").read_text()), ended.printed

    return evaluate


def test_the_whole_grid_is_measured_in_one_pass(evaluate, tmp_path):
    out = tmp_path / "out"
    results, printed = evaluate(out)
    assert list(results) == GRID
    value = {name: {metric: entry["value"] for metric, entry in of.items()} for name, of in results.items()}
    rows = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert len(rows) == 24 - SHOTS
    validation = [row["id"] for row in rows if is_validation(InternetQuestion(Example(row["id"], "", "all"), ("x",)))]
    assert results["poe@3"]["exact_match"]["n"] == len(rows) - len(validation)
    assert results["poe@3"]["validation"]["n"] == len(validation)
    assert set(results["poe@3"]["validation"]["weights"]) > {"passage", "answer_given_question"}
    assert value["direct@1"]["retrieval_recall"] == 1.0 and value["direct@1"]["answer_in_evidence"] == 1.0
    assert value["direct@3"]["best_candidate"] >= value["direct@1"]["best_candidate"]
    assert value["direct@1"]["prompt_tokens"] < value["direct@3"]["prompt_tokens"] < value["poe@3"]["prompt_tokens"]
    assert value["none"]["lm_calls"] == 1 and "flop" in value["poe@3"] and "poe@3 - none" not in value["none"]
    assert "exact_match - direct@1" in results["poe@3"] and "wilson" in results["poe@3"]["exact_match"]
    examples = pq.read_table(out / "examples.parquet").to_pylist()
    assert len(examples) == (len(rows) - len(validation)) * len(GRID)
    assert {len(row["documents"]) for row in examples if row["method"] == "poe@2"} == {2}
    assert "million tokens are put to the LM" in printed
    assert (out / "flop.svg").read_text().startswith("<svg") and "Weights are fitted on" in (out / "table.md").read_text()
    again, printed = evaluate(out)
    assert again == results and "holds a finished evaluation" in printed


def test_labels_are_scored_by_another_lm(evaluate, tmp_path):
    out = tmp_path / "out"
    settings = ["rerank_lm.path=stand_in", "methods=[none,gold,direct@2,poe@2]", "data.corpus=" + "null"]
    results, _ = evaluate(out, *settings[:2], dataset="strategyqa", file="strategyqa.json")
    assert results["poe@2"]["accuracy"]["n"] <= 5 and "copied" not in results["poe@2"]
    with ScoreCache(out / "rerank_scores.sqlite") as cache:
        assert sum(use.misses for use in cache.models()) > 0
    assert "reranked by" in (out / "lm.json").read_text()


def wait_for_lines(process: subprocess.Popen, path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or len(path.read_bytes().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked(out: Path) -> tuple[int, int]:
    """What the cache holds, and what the LM was asked for, that under way when it was killed too."""
    with ScoreCache(out / "scores.sqlite") as cache:
        return cache.num_rows(), sum(use.misses for use in cache.models())
